"""``with applied(model, hooks)``: run with hooks, check that each fired, and restore the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tl_posdisent.hooks.edit import Head
from tl_posdisent.hooks.hook_function import HookFunction, functions_on
from tl_posdisent.hooks.hook_list import check_entries
from tl_posdisent.models.running.forward_pass import Hook, installed
from tl_posdisent.models.running.model_parts import n_layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import head_label, shown
from tl_posdisent.utils.words import plural

_NAMED = 3  # heads that a message names


@contextlib.contextmanager
def applied(model: Any, hooks: Sequence[Hook]) -> Iterator[Any]:
    """Run a block with hooks on the model; on exit remove them and check that each fired.

    TransformerLens accepts some hook names that it never calls; an intervention then has no effect, without an error.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model.
        hooks: hooks of this package, or any list of ``(hook name or filter, function)``. Lists that are added,
            ``a + b``, act together. Lists in nested blocks may act on different heads; if two change the attention of
            one head, or its result, the forward pass raises.

    Yields:
        The model itself.

    Raises:
        ValueError: hooks that are not such a list, belong to another model, or name a hook that the model lacks.
        RuntimeError: at the end of the block, if some hooks never fired (unless another exception is propagating).

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> from tl_posdisent.hooks import applied
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> plain = model(tokens)
        >>> with applied(model, dummy_distance(model, 3)) as m:
        ...     changed = m(tokens)
        >>> bool((plain - changed).abs().max() > 0.1), bool((model(tokens) == plain).all())
        (True, True)
    """
    n_layers(model)
    with applied_at(model.hook_dict, hooks):
        yield model


@contextlib.contextmanager
def applied_at(there: dict[str, Any], hooks: Sequence[Hook]) -> Iterator[None]:
    """Do what ``applied`` does, given the model's hook points by name, which a bridge lists anew at each access."""
    hooks = _checked(there, hooks)
    fired: list[dict[str, int]] = []
    counting: list[tuple[Any, Callable[..., Any]]] = []

    def count(function: Callable[..., Any], counts: dict[str, int], name: str, x: Any, hook: Any) -> Any:
        counts[name] += 1
        return function(x, hook=hook)

    for name, function in hooks:  # a filter counts each point once, though a bridge has several names for some
        points = {there[x]: x for x in reversed(there) if (x == name if isinstance(name, str) else name(x))}
        if not points:
            raise ArgumentError(
                "hooks", f"must name hooks of this model, got {shown(function)}, whose filter accepts none"
            )
        fired.append(dict.fromkeys(reversed(points.values()), 0))
        counting += [(there[x], functools.partial(count, function, fired[-1], x)) for x in fired[-1]]
    with installed(counting):
        yield
    idle = [
        name
        for (_, function), counts in zip(hooks, fired, strict=True)
        for name, n in counts.items()
        if not n
        and (function.places.get(there[name].name) if isinstance(function, HookFunction) else not any(counts.values()))
    ]
    if idle:
        raise RuntimeError(
            f"these hooks never fired, so nothing was changed there: {', '.join(idle[:6])}"
            + (f" and {len(idle) - 6} more" if len(idle) > 6 else "")
            + ("; was the model run inside the block?" if not any(n for x in fired for n in x.values()) else "")
        )


def check_hooks(model: Any, hooks: Any) -> list[Hook]:
    """Validate a list of hooks for ``fwd_hooks``, and the names in it."""
    return _checked(model.hook_dict, hooks)


def _checked(there: dict[str, Any], hooks: Any) -> list[Hook]:
    found = check_entries(hooks)
    for name, _ in found:
        if isinstance(name, str) and name not in there:
            raise ArgumentError("hooks", f"names {name!r}, which the model does not have")
    return found


def check_free(model: Any, heads: Collection[Head]) -> None:
    """Raise if interventions of this package that are on the model change one of these heads."""
    points = set(model.hook_dict.values())
    left = {x for point in points for function in functions_on(point) for layer in function.layers for x in layer.pairs}
    if found := sorted(left.intersection(heads)):
        labels = ", ".join(head_label(*head) for head in found[:_NAMED])
        more = f" and of {plural(len(found) - _NAMED, 'other head')}" if len(found) > _NAMED else ""
        raise ArgumentError(
            "model",
            f"must not have hooks of this package on the heads that are measured, got some that change {labels}{more}: "
            "remove them, or measure other heads",
        )
