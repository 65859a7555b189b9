"""``with applied(model, hooks)``: run with hooks, check that each fired, and restore the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.spec import n_layers


@contextlib.contextmanager
def applied(model: Any, hooks: Sequence[Hook]) -> Iterator[Any]:
    """Run a block with hooks on the model; on exit remove them and check that each fired.

    TransformerLens accepts some hook names that it never calls; an intervention then has no effect, without an error.
    Other hooks on the model are not changed. The lists work without this
    context too, in ``model.hooks(fwd_hooks=...)`` and ``model.run_with_hooks(...)``.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        hooks: ``[(hook name, function), ...]`` as every intervention of this package returns them. Concatenated or
            nested lists act together, in any order alike: on each head at most one position intervention (swapped
            positions, a dummy or remapped distance, the Λ-mask), with interpolation, frequency limits and phase noise;
            on its scores, edits of components; on its result, one ablation. What does not compose is a ``ValueError``
            while the model runs.

    Yields:
        The model itself.

    Raises:
        ValueError: hooks that are not such a list; names that the model does not have; a model that is not
            TransformerLens's.
        RuntimeError: at the end of the block, names of hooks that never fired (unless an exception is on its way).

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> from tl_posdisent.hooks import applied
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> plain = model(tokens)
        >>> with applied(model, dummy_distance(model, 3)) as m:
        ...     lying = m(tokens)
        >>> bool((plain - lying).abs().max() > 0.1), bool((model(tokens) == plain).all())
        (True, True)
    """
    n_layers(model)
    if not isinstance(hooks, Iterable):
        raise ValueError(f"hooks must be a list of (hook name, function), got {hooks!r}")
    hooks, there = list(hooks), model.hook_dict
    for hook in hooks:
        if not (isinstance(hook, tuple) and len(hook) == 2 and isinstance(hook[0], str) and callable(hook[1])):
            raise ValueError(f"hooks must be a list of (hook name, function), got {hook!r} in it")
        if hook[0] not in there:
            raise ValueError(f"hooks names {hook[0]!r}, which the model does not have")
    fired = [0] * len(hooks)

    def counted(n: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(x: Any, hook: Any) -> Any:
            fired[n] += 1
            return function(x, hook=hook)

        return count

    with _added([(there[name], counted(n, function)) for n, (name, function) in enumerate(hooks)]):
        yield model
    idle = [name for n, (name, _) in enumerate(hooks) if not fired[n]]
    if idle:
        raise RuntimeError(
            f"these hooks never fired, so nothing was changed there: {', '.join(idle)}"
            + ("; was the model run inside the block?" if len(idle) == len(hooks) else "")
        )


@contextlib.contextmanager
def _added(placed: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """As ``model.hooks``, but at hook points: a bridge lists all of its points for each name that it is given."""
    added = []
    try:
        for point, function in placed:
            point.add_hook(function)
            added.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]
