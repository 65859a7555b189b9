"""The public names of the package and of its namespaces."""

from __future__ import annotations

from typing import Any

import tl_posdisent

NAMESPACES = ("additive", "demo", "experiments", "hooks", "models", "rope", "sweeps", "synthetic", "viz")


def public_names() -> dict[str, Any]:
    """Return every public object by its name."""
    modules = [tl_posdisent, *(getattr(tl_posdisent, name) for name in NAMESPACES)]
    return {name: getattr(module, name) for module in modules for name in module.__all__ if name not in NAMESPACES}
