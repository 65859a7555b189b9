"""Edit one attention layer in one forward pass, as a function of its edits and of what the pass showed.

A head's scores are edited in a fixed order: first all edits of its rotation, by adding the difference that they make to
the model's own scores, then the score edits. A model that shows no scores discards edited ones too: its result is
computed from them and put in at ``hook_z``. Edits of results come last, regardless of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits.agreement import check_pattern, check_result, rest_of_scores
from tl_posdisent.hooks.edits.head_edits import HeadRotation
from tl_posdisent.hooks.edits.layer_edits import LayerEdits
from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.hooks.edits.running_mask import check_one_text
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.hooks.edits.scores_at_distances import rotated_scores
from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.results import by_heads
from tl_posdisent.utils.errors import ArgumentError


def edit_scores(edits: LayerEdits, layer: RunningLayer) -> Float[Tensor, "batch head query key"]:
    """Return the scores of a layer under its edits."""
    scores, shows = layer.scores, layer.spec.taps.scores is not None
    check_whole_text(layer.spec, scores)
    rest = rest_of_scores(layer, edits.recomputed) if shows and edits.recomputed and layer.has_vectors else None
    if edits.by_place:
        _check_start(layer, edits.by_place)
    for rotation, heads in edits.rotated.items():
        before = _of_heads(scores, heads)
        places = [edits.recomputed.index(head) for head in heads]
        beyond = torch.zeros_like(before) if rest is None else _of_heads(rest, places)
        scores = _with_heads(scores, heads, rotated_scores(layer, rotation, heads, before, beyond))
    for edit, chosen in edits.score_edits:
        groups = edits.alike(chosen) if edit.vectors else {HeadRotation(): list(chosen)}
        for rotation, heads in groups.items():
            scores = _with_heads(scores, heads, _edited(layer, edit, rotation, heads, _of_heads(scores, heads)))
    return scores


def check_whole_text(spec: AttentionSpec, cells: Float[Tensor, "batch head query key"]) -> None:
    """Refuse scores or a pattern of a text that is run in parts, with a KV cache."""
    n_query, n_key = cells.shape[-2:]
    if n_query < n_key or n_query == 1:
        raise ValueError(
            f"hooks act on texts of two or more tokens, and layer {spec.layer} sees {n_query} of {n_key} tokens: "
            "run the model without a KV cache (generate with use_past_kv_cache=False)"
        )


def _check_start(layer: RunningLayer, tools: Sequence[str]) -> None:
    """Refuse functions of positions in rows whose first keys are hidden."""
    hidden = layer.mask.hides_start
    if bool(hidden.any()):
        raise ArgumentError(
            "attention_mask",
            f"must not hide the first keys of a row for {' and '.join(tools)}, got such a mask in row "
            f"{int(hidden.nonzero()[0])} of layer {layer.spec.layer}, where the positions of tokens are ambiguous: pad "
            "on the right, or run each text alone",
        )


def _edited(
    layer: RunningLayer, edit: ScoreEdit, rotation: HeadRotation, heads: list[int], scores: Tensor
) -> Float[Tensor, "batch head query key"]:
    """Apply one score edit to the scores of some heads, which stay unchanged outside the mask."""
    visible = _of_mask(layer.mask.visible if edit.order == Order.HIDE else layer.mask.of_text, heads)
    if edit.order in (Order.REPLACE, Order.COMPONENT):
        check_one_text(layer.spec, visible, edit.tool)
    inside = visible & (scores != -torch.inf)
    vectors = None
    if edit.vectors:
        vectors = layer.q[:, :, heads], layer.k[:, :, [layer.spec.key_head(head) for head in heads]]
    view = View(layer.spec, heads, inside, rotation, scores, vectors)
    if edit.order == Order.HIDE:  # also what is masked already, so that nothing depends on whether a score is a mask
        new = edit.edit(view)
        blind = ~(inside & (new != -torch.inf)).any(-1)
        _check_keys_left(layer, edit, inside.any(-1) & blind)
        new = torch.where(blind[..., None], scores, new)  # at padding, which may see no key anyway
    else:
        new = torch.where(inside, edit.edit(view).to(scores.dtype), scores)
    return new


def _check_keys_left(layer: RunningLayer, edit: ScoreEdit, blind: Bool[Tensor, "batch head query"]) -> None:
    """Refuse an edit that hides the last key that a query of a text sees: a softmax without keys has no meaning."""
    blind = blind & ~layer.mask.after[:, None]
    if bool(blind.any()):
        raise ValueError(
            f"{edit.tool} must leave each query a key, and in layer {layer.spec.layer} query "
            f"{int(blind.nonzero()[0, -1])} would see none, with what other edits and the model's mask hide: hide fewer"
        )


def _of_heads(scores: Float[Tensor, "batch head query key"], heads: list[int]) -> Float[Tensor, "batch _ query key"]:
    return scores if len(heads) == scores.shape[1] else scores[:, heads]


def _of_mask(inside: Bool[Tensor, "*lead query key"], heads: list[int]) -> Bool[Tensor, "*_ query key"]:
    return inside[:, heads] if inside.ndim == 4 and inside.shape[1] > 1 else inside


def _with_heads(scores: Tensor, heads: list[int], new: Tensor) -> Float[Tensor, "batch head query key"]:
    if len(heads) == scores.shape[1]:
        return new
    return scores.index_copy(1, torch.tensor(heads, device=scores.device), new.to(scores.dtype))


# --- models that neither show scores nor use edited ones


def edit_attention_result(edits: LayerEdits, layer: RunningLayer, z: Tensor) -> Tensor:
    """Return z with the attention of edited heads put in, for a text without padding."""
    scores = edit_scores(edits, layer)[:, edits.heads]
    pattern = masked_softmax(scores, layer.mask.visible)
    result = layer.gathered(pattern, edits.heads).to(z.dtype)
    return z.index_copy(2, torch.tensor(edits.heads, device=z.device), result)


def check_hidden_attention(edits: LayerEdits, layer: RunningLayer) -> None:
    """Compare what the edits relied on with pattern and result, once both are seen, in whichever order."""
    assert layer.spec.taps.pattern is not None
    assert layer.spec.taps.z is not None
    pattern = layer.tensors[layer.spec.taps.pattern]
    check_whole_text(layer.spec, pattern)
    check_pattern(layer, edits.heads, pattern)
    check_result(layer, edits.heads, layer.tensors[layer.spec.taps.z], pattern)


# --- results


def edit_results(edits: LayerEdits, z: Tensor) -> Tensor:
    """Return z with the output of some heads replaced."""
    by_head = by_heads(z, edits.spec.n_heads)
    for edit, heads in edits.result_edits:
        at = torch.tensor(heads, device=z.device)
        by_head = by_head.index_copy(2, at, edit.replace(edits.spec.layer, heads, by_head[:, :, at]).to(z.dtype))
    return by_head.reshape(z.shape)
