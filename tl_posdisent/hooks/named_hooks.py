"""Several interventions, each under its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

Interventions = Mapping[str, Sequence[Hook]] | Hooks
"""Lists of hooks by name, or hooks of one intervention."""

UNMODIFIED = "unmodified"
"""The name of the run without hooks in tables of several interventions."""


def named_hooks(model: Any, interventions: Any) -> dict[str, Sequence[Hook]]:
    """Validate interventions, and return the hooks of each by its name.

    Raises:
        ValueError: what is not a mapping from names to lists of hooks of this model, or one list; an empty list; the
            name ``UNMODIFIED``.
    """
    if isinstance(interventions, Hooks):
        interventions = {interventions.name: interventions}
    named = isinstance(interventions, Mapping) and all(isinstance(name, str) for name in interventions)
    if not named or not interventions:
        raise ArgumentError(
            "interventions",
            f'must be hooks by name, {{"name": hooks}}, or those of one intervention of this package, got '
            f"{shown(interventions)}; intervention_losses takes hooks of your own as well, by name",
        )
    if UNMODIFIED in interventions:
        raise ArgumentError("interventions", f"must not be named {UNMODIFIED!r}, the run without hooks: rename it")
    by_name: dict[str, Sequence[Hook]] = {}
    for name, hooks in interventions.items():
        try:
            by_name[name] = hooks if isinstance(hooks, Hooks) else check_hooks(model, hooks)
        except ValueError as error:
            raise ArgumentError("interventions", f"must be hooks by name; {name!r}: {error}") from error
        if not by_name[name]:
            raise ArgumentError("interventions", f"must have hooks, got {shown(hooks)} for {name!r}")
    return by_name
