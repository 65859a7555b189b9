"""Names of models: known ones, and the nearest to a mistyped one, without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tl_posdisent.models.loading.packaged import PACKAGED
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import found_at
from tl_posdisent.utils.words import did_you_mean

OWN = ("demo", *PACKAGED)
"""Names of models that come in Python packages, this one included."""


def check_model_name(name: str, argument: str = "model") -> None:
    """Raise unless ``name`` is a path, a packaged model, a repository (``owner/name``) or known to TransformerLens.

    No hub is asked. Whether a path or a repository exists is checked at loading.

    Raises:
        ValueError: an unknown name without a slash; the message names the nearest known one.

    Example:
        >>> check_model_name("EleutherAI/pythia-70m")
        >>> check_model_name("smolm2")
        Traceback (most recent call last):
            ...
        tl_posdisent.utils.errors.ArgumentError: model must be a known name, got 'smolm2': did you mean 'smollm2'?
    """
    if name in OWN or "/" in name or "\\" in name or name.startswith((".", "~")) or found_at(name):
        return
    if name.endswith(".gguf"):  # a path, whose absence load_model reports
        return
    known = _of_transformer_lens()
    if name in known:
        return
    # Own names first: many of TransformerLens's are as near.
    hint = did_you_mean(name, OWN, known, otherwise="pass the path of a folder, or owner/name of a repository")
    raise ArgumentError(argument, f"must be a known name, got {name[:80]!r}{hint}")


def _of_transformer_lens() -> list[str]:
    """List the names and short names of the installed TransformerLens."""
    lists = _lists_alone()
    short = [alias for aliases in lists.MODEL_ALIASES.values() for alias in aliases]
    return [*lists.OFFICIAL_MODEL_NAMES, *short]


def _lists_alone() -> Any:
    """Run the module that only lists names, without the package above it, whose import takes seconds."""
    package = importlib.util.find_spec("transformer_lens")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(
        "_names_of_models", Path(package.origin).with_name("supported_models.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
