"""Head ablation: replace the output of heads at ``hook_z``, before the output projection mixes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.hooks.edit import NewResult
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.slots import ChosenSlots, Slots, checked_slots, slot_mask, slots_text
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.results import at_results
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_seed

AblationMode = Literal["zero", "mean", "resample"]

StandIn = Callable[[int, Sequence[int], Tensor], Tensor]
"""Map a layer, some of its heads and their z ``[batch, pos, head, d_head]`` to the replacement of that z."""


def ablate_heads(
    model: Any,
    heads: Heads,
    *,
    layers: Layers = None,
    mode: AblationMode = "zero",
    reference: Tokens | None = None,
    seed: int = 0,
    positions: Slots = None,
) -> Hooks:
    """Ablate heads at ``hook_z`` (zero, mean or resample).

    ``z[b, i, h]``, the output of head h at position i before the output projection, is replaced by

    * ``"zero"``: 0;
    * ``"mean"``: its mean over all texts and positions of a reference;
    * ``"resample"``: ``z[σ(b), i, h]``, its output at the same position of another text of the batch. σ is drawn
      uniformly from the permutations that leave no text in its place; it is the same for all heads. All texts of the
      batch must have the same length, without padding, which is not checked.

    If values have a bias (GPT-NeoX, GPT-2, Qwen 2), ``"zero"`` depends on TransformerLens's weight processing
    (``enable_compatibility_mode()``, ``HookedTransformer.from_pretrained``): it moves the biases from z to the bias of
    the layer's output, where zeros do not remove them. ``"mean"`` and ``"resample"`` do not depend on it.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model.
        heads: query heads: pairs ``(layer, head)``, or integers, the same heads in each of ``layers``.
        layers: default all layers with attention.
        mode: ``"zero"``, ``"mean"`` or ``"resample"``, as above.
        reference: for ``"mean"`` only: ids ``[batch, pos]`` without padding, or text or texts (a list, of any lengths)
            if the model has a tokenizer. It is run now, with the hooks that are on the model.
        seed: for ``"resample"``: the seed from which σ is drawn.
        positions: tokens at which z is replaced, as slots of the batch, padding included: an index (negative from the
            end), a range, a slice, several indices or booleans ``(pos,)``; None for all.

    Raises:
        ValueError: heads out of range, repeated or missing; an unknown mode; a reference with a mode that needs none,
            or none with ``"mean"``; invalid tokens; positions that are not integers; a layer whose heads cannot be
            ablated at ``hook_z``. While running: ``"resample"`` in a batch of one text; positions
            beyond the text, or with a KV cache.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, load_demo_model
        >>> model = load_demo_model()
        >>> hooks = ablate_heads(model, [(0, 3), (0, 5), (2, 1)])
        >>> hooks
        ablate_heads(zero) on L0H3, L0H5, L2H1
        >>> with model.hooks(fwd_hooks=hooks):
        ...     _, cache = model.run_with_cache(demo_tokens(length=64))
        >>> cache["z", 0].abs().sum((0, 1, 3)).bool().tolist()  # head by head
        [True, True, True, False, True, False, True, True]
    """
    reading = read_model(model)
    chosen = any_heads(reading, layers, heads)
    check_mode(mode, reference, seed)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    replace = stand_in(reading.model, [spec.layer for spec, _ in chosen], mode, reference, seed)
    call = f"ablate_heads({mode})"
    if positions is not None:
        slots = checked_slots("positions", positions)
        call, replace = f"ablate_heads({mode}, {slots_text(slots)})", partial(_at_slots, replace=replace, slots=slots)
    return hooks_for(chosen, call, z=NewResult(replace, by_slot=positions is not None, resamples=mode == "resample"))


def replace_heads(spec: AttentionSpec, heads: Sequence[int], replace: StandIn) -> Hooks:
    return hooks_for([(spec, heads)], "ablate_heads", z=NewResult(replace))


def _at_slots(layer: int, heads: Sequence[int], z: Tensor, *, replace: StandIn, slots: ChosenSlots) -> Tensor:
    """Replace z at some tokens alone."""
    here = slot_mask("positions", slots, z.shape[1], z.device)
    return torch.where(here[:, None, None], replace(layer, heads, z).to(z.dtype), z)


def stand_in(model: Any, layers: Sequence[int], mode: AblationMode, reference: Any, seed: int) -> StandIn:
    """Return the function that replaces z in this mode; for ``"mean"``, run the reference up to these layers.

    Of ``Texts``, the mean is over the tokens whose predictions count.
    """
    means: dict[int, Tensor] = {}
    if mode == "mean":
        try:
            texts = read_texts(model, reference)
            n_tokens = int(texts.counted.sum())

            def add(layer: int, counted: Tensor, z: Tensor) -> None:  # in float64
                some = z.double() * counted.to(z.device)[..., None, None]
                means[layer] = means.get(layer, 0.0) + some.sum((0, 1)) / n_tokens

            for group in texts.groups:
                listeners = [
                    at_results(layer, model.cfg.n_heads, partial(add, layer, group.counted)) for layer in layers
                ]
                with running(model) as p:
                    p.run(group.tokens, listeners, stop=max(layers) + 1)
        except ValueError as error:
            if isinstance(reference, Texts):  # of a caller that has its own name for them
                raise
            raise ValueError(f"reference: {error}") from error

    return partial(_replaced, mode=mode, means=means, seed=seed)


def _replaced(
    layer: int, heads: Sequence[int], z: Tensor, *, mode: AblationMode, means: dict[int, Tensor], seed: int
) -> Tensor:
    if mode == "zero":
        return torch.zeros_like(z)
    if mode == "mean":
        return means[layer][list(heads)].expand_as(z)
    return z[derangement(len(z), seed).to(z.device)]


def derangement(n: int, seed: int) -> Int[Tensor, " text"]:
    """Draw a permutation of n texts that leaves none in its place, uniformly among such permutations."""
    if n < 2:
        raise ArgumentError("mode", f'"resample" needs a batch of at least two texts, got {n}')
    generator, places = torch.Generator().manual_seed(seed), torch.arange(n)
    while True:  # e = 2.7 draws on average, whatever n
        order = torch.randperm(n, generator=generator)
        if not bool((order == places).any()):
            return order


def check_mode(mode: Any, reference: Any, seed: Any) -> None:
    check_choice("mode", mode, get_args(AblationMode))
    if (mode == "mean") != (reference is not None):
        wanted = "must be tokens" if mode == "mean" else "must not be given"
        got = "None" if reference is None else type(reference).__name__
        raise ValueError(f'reference {wanted} with mode "{mode}", got {got}')
    check_seed(seed)


def check_reach(model: Any, layers: Sequence[int]) -> None:
    """Raise if one of the layers has no hook of its heads' outputs."""
    for spec in read_model(model).specs(layers):
        if spec.why_no_result_edits:
            raise ValueError(f"layer {spec.layer}: {spec.why_no_result_edits}")
