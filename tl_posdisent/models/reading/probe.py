"""Find out what each attention layer does, with a few short forward passes.

First record which hooks fire and what they carry, and let ``explanation.py`` find the rotation, scale and soft cap that
reproduce the layer's own scores. Then perturb the tensors, to find which edits take effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.candidates import (
    LATENT_KEYS,
    LATENT_QUERIES,
    OwnNumbers,
    own_numbers,
    queries_and_keys,
)
from tl_posdisent.models.reading.explanation import explain, lenders, with_lent
from tl_posdisent.models.reading.seen import Seen, is_softmax
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, Pass, running
from tl_posdisent.models.running.model_parts import architecture, hook_name, n_layers
from tl_posdisent.models.running.texts import check_tokens, probe_tokens
from tl_posdisent.utils.errors import ArgumentError


def probe(model: Any, layers: Sequence[int]) -> list[AttentionSpec]:
    """Measure an ``AttentionSpec`` for each of these layers by running the model."""
    tokens = check_tokens(model, probe_tokens(model))
    with running(model, bare=True) as p, torch.no_grad():
        # HookedTransformer, and a bridge in compatibility mode, replace NaN in the pattern by 0.
        hides_nan = getattr(model, "compatibility_mode", not hasattr(model, "original_model"))
        with _running_each_block_once(p):
            every = hides_nan or any(lenders(p, layer) for layer in layers)
            seen = listen(p, tokens, range(n_layers(model)) if every else layers, whole=True)
        for layer, tensors in seen.items():
            ends = [x for name, x in tensors.items() if name in ("hook_attn_scores", "hook_pattern")]
            if not all(bool((x < torch.inf).all()) for x in ends):  # NaN is not less
                raise ValueError(
                    f"layer {layer} of {architecture(model)}: its scores are NaN or infinite: check the "
                    "weights, and whether numbers of this size fit its dtype"
                )
        own = own_numbers(model)  # after the pass, which may overwrite them
        specs = [_explained(p, layer, seen, own) for layer in layers]

        # A pattern alone says little about scores that are very large or almost equal: give them an ordinary size.
        def resize(size: float, x: Tensor, hook: Any) -> Tensor:
            return (size * x / x.double().square().mean().sqrt().clamp_min(1e-30)).to(x.dtype)

        edits: list[Hook] = []
        for spec in specs:
            if not seen[spec.layer].shows_scores:
                own_taps = next(queries_and_keys(model, spec.layer, seen[spec.layer]), ())
                size = (spec.d_head**0.5 * (spec.scale or spec.d_head**-0.5)) ** -0.5  # so that scores have variance 1
                taps = (spec.taps.q, spec.taps.k) if spec.taps.q and spec.taps.k else own_taps
                edits += [(tap.name, partial(resize, size)) for tap in taps if tap.norm is None]
        if edits:
            seen = listen(p, tokens, specs, edits)
            again = [explain(p, s.layer, seen[s.layer], own, s.taps.keys_of) for s in specs]
            specs = again
        return check_edited_scores(p, tokens, specs, edits)


def _explained(p: Pass, layer: int, seen: dict[int, Seen], own: OwnNumbers) -> AttentionSpec:
    """Explain a layer by its own keys or, if it has none, by those of an earlier layer, the nearest first."""
    spec = explain(p, layer, seen[layer], own)
    for lender in lenders(p, layer):
        lent = explain(p, layer, with_lent(seen[layer], seen[lender]), own, lender)
        if lent.limits.problem is None:
            return lent
        spec = spec.with_limits(problem="it has no keys of its own, and those of no earlier layer explain its pattern")
    return spec


@contextlib.contextmanager
def _running_each_block_once(p: Pass) -> Iterator[None]:
    """Refuse a model that runs a block several times in a pass: hooks, layers and tables have one place for each."""
    blocks = enumerate(p.model.blocks)
    parts = {part: n for n, block in blocks for part in (block, getattr(block, "attn", None)) if part is not None}
    with p.counting_runs(parts) as runs:
        yield
    for part, times in runs.items():
        if times > 1:
            raise ArgumentError(
                "model",
                f"must run each block once in a pass, got {architecture(p.model)}, which runs block "
                f"{parts[part]} {times} times. Models with such loops are not supported",
            )


# --- one pass, and what fires in it

_LISTEN = (
    *("hook_q", "hook_k", "hook_v", "hook_q_normed", "hook_k_normed", "hook_rot_q", "hook_rot_k"),
    *("hook_cos", "hook_sin", "hook_attn_scores", "hook_pattern", "hook_z"),
    *("q_norm.hook_out", "k_norm.hook_out", "v_norm.hook_out", "gate.hook_out"),
    *("q_norm.hook_in", "k_norm.hook_in"),
    *LATENT_QUERIES,
    *LATENT_KEYS,
)


def listen(
    p: Pass,
    tokens: Tensor,
    read: Sequence[int | AttentionSpec],
    edits: Sequence[Hook] = (),
    *,
    whole: bool = False,
    **more: Any,
) -> dict[int, Seen]:
    """Run one pass under edits and return what fired in each layer, after the edits; ``more`` are its arguments.

    Specs tell which layers attend to the keys of another. The pass ends after the last layer, unless it is to be a
    ``whole`` one.
    """
    keys_of = {x.layer: x.taps.keys_of for x in read if isinstance(x, AttentionSpec) and x.taps.keys_of is not None}
    layers = sorted({*(x if isinstance(x, int) else x.layer for x in read), *keys_of.values()})
    places = {hook_name(layer, short): (layer, short) for layer in layers for short in _LISTEN}
    there = [name for name in places if name in p.points]
    tensors: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
    for name, x in p.record(tokens, there, edits, stop=None if whole else max(layers) + 1, **more).items():
        layer, short = places[name]
        tensors[layer][short] = x
    seen = {layer: Seen(shown) for layer, shown in tensors.items()}
    return seen | {layer: with_lent(seen[layer], seen[lender]) for layer, lender in keys_of.items()}


# --- edits that take effect


def check_edited_scores(
    p: Pass, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]
) -> list[AttentionSpec]:
    """Test which layers use edited scores, under the edits ``first``.

    Scores are replaced by random ones of ordinary size: a little noise would not change a sharp softmax.
    """
    generator = torch.Generator().manual_seed(2)

    def disturb(spec: AttentionSpec, x: Tensor, hook: Any) -> Tensor:
        noise = torch.randn(x.shape, generator=generator).to(x)
        return torch.where(spec.is_masked(x), x, noise)

    edits = [(spec.taps.scores, partial(disturb, spec)) for spec in specs if spec.taps.scores]
    seen = listen(p, tokens, specs, [*first, *edits]) if edits else {}
    return [judge_edits(spec, seen.get(spec.layer, Seen({}))) for spec in specs]


def judge_edits(spec: AttentionSpec, seen: Seen) -> AttentionSpec:
    """Say whether the pattern of a layer is that of its edited scores, and whether its rotation can be edited."""
    visible = seen.visible
    if spec.taps.scores and visible is not None and "hook_pattern" in seen:
        editable = is_softmax(seen["hook_pattern"], seen["hook_attn_scores"], visible)
        spec = spec.with_limits(scores_editable=editable)
    if spec.rotary is None or spec.scores_can_be_edited:
        return spec
    return spec.with_limits(no_rotation=spec.why_no_score_edits)
