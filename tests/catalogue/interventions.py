"""Rows about hooks that change a model's positions, heads, scores."""

from __future__ import annotations

from typing import Any

import torch

from tl_posdisent import (
    ablate_heads,
    additive_substitution,
    attention_ladder,
    component_patching,
    dummy_distance,
    head_patching,
    head_verdicts,
    lambda_mask,
    limit_frequencies,
    perturbation_curve,
    position_interpolation,
    position_patching,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import (
    applied,
    drop_component,
    fit_attention_layers,
    patch_scores,
    patch_vectors,
    phase_noise,
    substitute_additive,
    substitute_attention,
)

from .given import INF, NAN, SCORES, TOKENS, model, numbers
from .row import Row, gives, refused

AT = torch.arange(12)
QR, KR = numbers(2, 12, 8, 8), numbers(2, 12, 4, 8)


def logits(hooks: list[Any]) -> torch.Tensor:
    with torch.no_grad(), applied(model(), hooks):
        return model()(TOKENS)


def _same(a: list[Any], b: list[Any], atol: float = 1e-4) -> bool:
    return torch.allclose(logits(a), logits(b), atol=atol)


def _shifted(shift: float) -> bool:
    """RoPE sees differences only."""
    return _same(swap_positions(model(), AT + shift), swap_positions(model(), AT), atol=1e-3)


def _all_at_one_place() -> bool:
    return _same(swap_positions(model(), torch.full((12,), 7)), dummy_distance(model(), 0))


def _per_text() -> bool:
    """Each text its own positions: the first text is as if the second were not there."""
    both = logits(swap_positions(model(), torch.stack([AT * 2, AT.flip(0)])))
    one = logits(swap_positions(model(), AT * 2))
    return torch.equal(both[0], one[0]) and not torch.allclose(both[1], one[1], atol=1e-3)


def _too_short() -> Any:
    with applied(model(), swap_positions(model(), AT[:5])):
        return model()(TOKENS)


def _used(hooks: list[Any]) -> Any:
    return logits(hooks)


ROWS: list[Row] = [
    gives("swap_positions", "negative positions", lambda at: _shifted(-40.0)),
    gives("swap_positions", "positions that are no integers", lambda at: _shifted(0.25)),
    gives("swap_positions", "huge positions", lambda at: _shifted(4096.0)),
    gives("swap_positions", "the same position for all", lambda at: _all_at_one_place()),
    gives("swap_positions", "positions for each text", lambda at: _per_text()),
    refused("swap_positions", "NaN", lambda at: swap_positions(model(), AT * NAN), "positions must be finite"),
    refused("swap_positions", "inf", lambda at: swap_positions(model(), [0.0, INF]), "positions must be finite"),
    refused("swap_positions", "three axes", lambda at: swap_positions(model(), AT[None, None]), "positions must have"),
    refused("swap_positions", "no positions", lambda at: swap_positions(model(), []), "positions must"),
    refused("swap_positions", "words", lambda at: swap_positions(model(), "0 1 2"), "positions must"),
    refused("swap_positions", "complex", lambda at: swap_positions(model(), AT * 1j), "positions must"),
    refused("swap_positions", "fewer than tokens", lambda at: _too_short(), "positions were given for 5", "12"),
    refused("dummy_distance", "NaN", lambda at: dummy_distance(model(), NAN), "distance must be"),
    refused("dummy_distance", "inf", lambda at: dummy_distance(model(), INF), "distance must be"),
    refused("dummy_distance", "a word", lambda at: dummy_distance(model(), "3"), "distance must be"),
    refused("remap_distance", "a number", lambda at: remap_distance(model(), 3), "distances must"),
    refused(
        "remap_distance",
        "a table of another size",
        lambda at: _used(remap_distance(model(), numbers(5, 5))),
        "distances",
    ),
    refused(
        "remap_distance",
        "a function that gives NaN",
        lambda at: _used(remap_distance(model(), lambda d: d * NAN)),
        "distances",
        "finite",
    ),
    refused(
        "remap_distance",
        "a function that gives nothing",
        lambda at: _used(remap_distance(model(), lambda d: None)),
        "distances",
    ),
    refused("position_interpolation", "factor 0", lambda at: position_interpolation(model(), 0), "factor must be"),
    refused("position_interpolation", "factor NaN", lambda at: position_interpolation(model(), NAN), "factor must be"),
    refused("lambda_mask", "no window", lambda at: lambda_mask(model(), 1, 0, 4), "window must be"),
    refused("lambda_mask", "fewer than no sinks", lambda at: lambda_mask(model(), -1, 4, 4), "n_sink must be"),
    refused("lambda_mask", "ceiling -1", lambda at: lambda_mask(model(), 1, 4, -1), "distance_ceiling must be"),
    refused("limit_frequencies", "no band", lambda at: limit_frequencies(model(), 2.0, 1.0), "low"),
    refused("limit_frequencies", "NaN", lambda at: limit_frequencies(model(), NAN), "low must"),
    refused(
        "limit_frequencies", "an unknown mode", lambda at: limit_frequencies(model(), 0.1, mode="cut"), "mode must"
    ),
    refused("phase_noise", "NaN", lambda at: phase_noise(model(), NAN), "noise must"),
    refused("phase_noise", "negative", lambda at: phase_noise(model(), -0.1), "noise must"),
    refused("phase_noise", "of another shape", lambda at: _used(phase_noise(model(), numbers(12, 3))), "noise must"),
    refused("phase_noise", "seed in words", lambda at: phase_noise(model(), 0.1, seed="a"), "seed must be"),
    refused("ablate_heads", "a head too many", lambda at: ablate_heads(model(), [(0, 8)]), "heads must"),
    gives("ablate_heads", "numbers, of all layers", lambda at: len(ablate_heads(model(), [0, 1])) == 2),
    refused("ablate_heads", "no heads", lambda at: ablate_heads(model(), []), "heads must"),
    refused("ablate_heads", "an unknown mode", lambda at: ablate_heads(model(), [(0, 1)], mode="off"), "mode must"),
    refused(
        "ablate_heads", "means of nothing", lambda at: ablate_heads(model(), [(0, 1)], mode="mean"), "reference must"
    ),
    refused("drop_component", "an unknown part", lambda at: drop_component(model(), "place"), "component must be"),
    refused("substitute_additive", "an unknown part", lambda at: substitute_additive(model(), ["place"]), "keep must"),
    refused("substitute_additive", "four axes", lambda at: substitute_additive(model(), axes="four"), "axes must be"),
    refused("substitute_attention", "an unknown rung", lambda at: substitute_attention(model(), "top"), "by must be"),
    refused("substitute_attention", "a fit of nothing", lambda at: substitute_attention(model(), {0: None}), "by must"),
    refused(
        "substitute_attention",
        "bands descend",
        lambda at: substitute_attention(model(), "banded", bands=(4, 2)),
        "bands must",
    ),
    refused(
        "substitute_attention", "rank 0", lambda at: substitute_attention(model(), "low-rank", rank=0), "rank must"
    ),
    refused(
        "fit_attention_layers",
        "a rung of one text",
        lambda at: fit_attention_layers(model(), TOKENS, "additive"),
        "rung must be",
    ),
    refused(
        "attention_ladder",
        "an unknown rung",
        lambda at: attention_ladder(model(), TOKENS, rungs=["top"], progress=False),
        "rungs must be",
    ),
    refused(
        "attention_ladder",
        "longer held-out texts",
        lambda at: attention_ladder(model(), TOKENS[:, :8], heldout=TOKENS, progress=False),
        "heldout must be no longer",
    ),
    refused("head_verdicts", "no table", lambda at: head_verdicts(None), "table must be"),
    refused("head_verdicts", "share 2", lambda at: head_verdicts(None, share=2), "share must be"),
    refused(
        "additive_substitution",
        "four axes",
        lambda at: additive_substitution(model(), TOKENS, axes="four", progress=False),
        "axes must be",
    ),
    refused(
        "additive_substitution",
        "seed -1",
        lambda at: additive_substitution(model(), TOKENS, seed=-1, progress=False),
        "seed must be",
    ),
    refused("patch_vectors", "no vectors", lambda at: patch_vectors(model(), 0, None, None), "q_rot"),
    refused(
        "patch_vectors", "other heads", lambda at: _used(patch_vectors(model(), 0, QR[:, :, :3], None)), "q_rot must"
    ),
    refused("patch_vectors", "NaN", lambda at: _used(patch_vectors(model(), 0, QR * NAN, KR)), "q_rot must"),
    refused(
        "patch_vectors",
        "an unknown way with keys",
        lambda at: patch_vectors(model(), 0, QR, KR, keys="some"),
        "keys must",
    ),
    refused(
        "patch_scores",
        "of another length",
        lambda at: _used(patch_scores(model(), 0, SCORES[..., :5, :5])),
        "scores must",
    ),
    refused(
        "patch_scores", "NaN", lambda at: _used(patch_scores(model(), 0, SCORES * NAN)), "scores of layer 0", "finite"
    ),
    refused("patch_scores", "an unknown part", lambda at: patch_scores(model(), 0, SCORES, "place"), "component must"),
    refused(
        "position_patching",
        "positions NaN",
        lambda at: position_patching(model(), TOKENS, AT * NAN, progress=False),
        "positions must",
    ),
    refused(
        "position_patching",
        "an unknown direction",
        lambda at: position_patching(model(), TOKENS, AT * 2, direction="both", progress=False),
        "direction must be",
    ),
    refused(
        "component_patching",
        "from nowhere",
        lambda at: component_patching(model(), TOKENS, progress=False),
        "from_tokens",
    ),
    refused(
        "component_patching",
        "from other lengths",
        lambda at: component_patching(model(), TOKENS, from_tokens=TOKENS[:, :5], progress=False),
        "from_tokens must",
    ),
    refused(
        "head_patching",
        "texts of other lengths",
        lambda at: head_patching(model(), TOKENS, TOKENS[:, :5], _metric, progress=False),
        "corrupted_tokens must",
    ),
    refused(
        "head_patching",
        "an unknown activation",
        lambda at: head_patching(model(), TOKENS, TOKENS.flip(1), _metric, activation="mlp", progress=False),
        "activation must",
    ),
    refused(
        "head_patching",
        "a metric that gives NaN",
        lambda at: head_patching(model(), TOKENS, TOKENS.flip(1), lambda x, t: x[:, -1, 5] * NAN, progress=False),
        "metric must",
    ),
    refused(
        "perturbation_curve",
        "no kinds",
        lambda at: perturbation_curve(model(), TOKENS, [], progress=False),
        "kinds must",
    ),
    refused(
        "perturbation_curve",
        "no seeds",
        lambda at: perturbation_curve(model(), TOKENS, seeds=[], progress=False),
        "seeds must",
    ),
    refused(
        "perturbation_curve",
        "fraction 2",
        lambda at: perturbation_curve(model(), TOKENS, fractions=[0, 2.0], progress=False),
        "fraction",
    ),
]


def _metric(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 5]
