"""Attention before and after an intervention, and the difference, head by head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.cells import MaskKind, make_cells
from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.forward import Hook, check_tokens, run, token_words
from tl_posdisent.models.reading.model_reading import model_of, read_attention
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.utils.validation import check_choice

from .layout import Options, choose
from .offline import Widget
from .raster import beside

What = Literal["pattern", "scores"]


def show_change(
    before: Float[Tensor, "*batch query key"],
    after: Float[Tensor, "*batch query key"],
    tokens: Sequence[str],
    *,
    mask: MaskKind | Bool[Tensor, "query key"] = "causal",
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
    raster: bool = False,
) -> Widget:
    """Show two patterns, or two score matrices, and their difference, side by side in one colour scale, head by head.

    Args:
        before, after: ``[query, key]``, ``[head, query, key]`` or ``[text, head, query, key]``, from any two runs.
        mask: cells that count, as in ``fit_additive``; others may hold anything, and are shown as 0.
        tokens, heads, text, positions, scale, title, raster: as in ``show_scores``.

    Raises:
        ValueError: unusable arguments; a cell inside the mask that is not finite; more cells than a browser draws.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.viz import show_change
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> show_change(cache["pattern", 1], cache["pattern", 2], model.to_str_tokens(tokens[0]), title="Two layers")
        Widget('Two layers')
    """
    for name, x in (("before", before), ("after", after)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating point tensor of shape (*batch, query, key), got {got}")
    if before.shape != after.shape:
        raise ValueError(f"after must have the shape of before, {tuple(before.shape)}, got {tuple(after.shape)}")
    options = Options(heads, text, positions, scale, title, raster)
    return _change(before, after, tokens, mask, options, "Before and after")


def _change(before: Tensor, after: Tensor, tokens: Any, mask: Any, options: Options, title: str) -> Widget:
    choice = choose(before.shape, tokens, options, charts=3)
    at = torch.tensor(choice.positions, device="cpu")
    cells = make_cells(before.shape[-2:], mask)
    inside = cells.to_mask()[at][:, at]
    old, new = (torch.where(inside, choice.of(x.detach().cpu()), 0.0) for x in (before, after))
    for name, x in (("before", old), ("after", new)):
        if bool((x <= masked_below(x.dtype)).any()) or not bool(x.isfinite().all()):
            raise ValueError(f"{name} must be finite inside the mask, got NaN, infinite or masking values")
    shown = {"before": old, "after": new, "after − before": new - old}
    note = "Rows are queries, columns keys."
    return beside(shown, choice, choice.layout(shown.values(), title, note, causal=cells.low >= 0))


def show_interventions(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    hooks: Sequence[Hook],
    *,
    layer: int,
    what: What = "pattern",
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
    raster: bool = False,
) -> Widget:
    """Show the attention of a layer's heads without and with an intervention, such as a dummy distance.

    The model runs twice, without gradients. It is left unchanged, and a hook that does not fire is an error.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        hooks: of an intervention, or any ``fwd_hooks``.
        layer: whose attention to show; the hooks may act anywhere.
        what: ``"pattern"``, or ``"scores"`` where the model shows them.
        heads, text, positions, scale, title, raster: as in ``show_change``, which draws the result.

    Raises:
        ValueError: unusable arguments; a layer that does not show its scores, or whose pattern would not show what
            hooks at ``hook_z`` did to its scores; more cells than a browser draws.
        RuntimeError: a hook that never fired.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model, show_interventions
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> show_interventions(model, tokens, dummy_distance(model, 3), layer=4, title="All keys at distance 3")
        Widget('All keys at distance 3')
    """
    check_choice("what", what, get_args(What))
    spec, model = read_attention(model, layer), model_of(model)
    ids = check_tokens(model, tokens)
    options = Options(heads, text, positions, scale, title, raster)
    # What cannot be drawn is refused before the model runs.
    choose((len(ids), spec.n_heads, ids.shape[1], ids.shape[1]), [""] * ids.shape[1], options, charts=3)
    tap = spec.pattern if what == "pattern" else spec.scores
    if tap is None:
        raise ValueError(f"layer {layer} of {spec.architecture} does not show its {what}")
    before, after = _seen(model, ids, tap, []), _seen(model, ids, tap, hooks)
    z = str(spec.z)
    if not spec.scores_editable and any(name(z) if callable(name) else name == z for name, _ in hooks):
        raise ValueError(
            f"layer {layer} of {spec.architecture} discards edited scores, so hooks change what it attends to at "
            f"{spec.z}, behind its {what}: a picture would show nothing of it"
        )
    words, mask = token_words(model, ids[text]), spec.mask(ids.shape[1], before.device)
    return _change(before, after, words, mask, options, f"Layer {layer}: {what} before and after")


def _seen(model: Any, ids: Tensor, tap: str, hooks: Sequence[Hook]) -> Tensor:
    held: list[Tensor] = []
    with applied(model, hooks):
        run(model, ids, [(tap, lambda x, hook: held.append(x.detach()))])
    return held[-1]
