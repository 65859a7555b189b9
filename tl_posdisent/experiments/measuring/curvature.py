"""Estimates of what changes of heads do to each text, for all heads and changes at once, from gradients.

With z the results of the heads (``hook_z``), δ the change of one head's z given the inputs of the unmodified run, g the
gradient of a metric for z, and F the Fisher information of the predictions, the effect of the change is about::

    first order         g · δ             of any metric: attribution patching
    curvature           ½ δᵀ F δ          KL(unmodified ‖ changed), and the second order of the loss (Gauss-Newton)

F is estimated with labels drawn from the model's own predictions: the gradient s of their surprise has expectation 0,
and ``(s · δ)²`` has the expectation ``δᵀ F δ``. Each draw takes one backward pass; no parameter gets a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.looking import Results, look
from tl_posdisent.experiments.measuring.metrics import LogitDifference, Metric, as_numbers, is_separable, values_of
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.text_parts import Batch, Part, can_pad, parts_of
from tl_posdisent.experiments.measuring.token_losses import (
    clean_log_probabilities,
    counted_in,
    logits_of,
    n_predictions,
)
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.forward_pass import Pass, running, with_gradients
from tl_posdisent.models.running.model_parts import user_hooks
from tl_posdisent.models.running.partial_forward import BlockFacts, block_facts, of_texts, same
from tl_posdisent.models.running.results import at_results
from tl_posdisent.models.running.texts import TextGroup, Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

_MAX_LOGITS: Final = 2**24  # of a batch of several texts, whose graph is kept
_MAX_PROBABILITIES: Final = 2**22  # number of probabilities accumulated at a time


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimated effects of each change on each text, one head changed alone.

    Attributes:
        first: first-order effects on the metric by the name of the change; NaN without a metric.
        curvature: estimates of KL(unmodified ‖ changed), in nats per prediction; NaN without draws.
        predictions: number of predictions of each text that count.
    """

    first: dict[str, Float64[Tensor, "head text"]]
    curvature: dict[str, Float64[Tensor, "head text"]]
    predictions: Float64[Tensor, " text"]


def curvature(
    reading: ModelReading,
    texts: Texts,
    changes: Mapping[str, Hooks],
    heads: Mapping[str, Sequence[Head]],
    draws: int,
    *,
    seed: int = 0,
    metric: Metric | None = None,
    by_position: bool = False,
    facts: BlockFacts | None = None,
    bar: Any = None,
) -> Estimates:
    """Estimate what each change does to each text, for each head alone.

    For each text, a pass, and a backward pass for each draw and the metric, serve all heads and changes; each change
    takes one more pass through the attention of each layer.

    Args:
        reading: the model.
        changes: hooks by name, each acting on a text alone.
        heads: the heads of each change, by its name.
        draws: number of draws of labels for each text.
        seed: of the labels, which depend on it and the text's row alone.
        metric: what the first order is of, computed by torch operations that record gradients.
        by_position: whether curvature is the sum of that of the changes at each position, ``½ Σ_i δ_iᵀ F_ii δ_i``. It
            leaves out what changes at two positions do together to one prediction, and has a fraction of the noise: a
            square of each position's product, instead of one of their sum.
        facts: what short passes show about the model, if that is known.
        bar: a progress bar, which counts forward passes of a text.

    Raises:
        ValueError: a metric without gradients; draws for a model that returns neither logits by token nor by text;
            hooks that refuse a text.
    """
    n_texts, layers = len(texts.tokens), sorted({layer for some in heads.values() for layer, _ in some})
    first, curved = ({name: _missing(len(heads[name]), n_texts) for name in changes} for _ in range(2))
    predictions = torch.zeros(n_texts, dtype=torch.float64)
    with running(reading.model) as p:
        facts = facts or block_facts(p)
        together = (metric is not None and not is_separable(metric)) or bool(user_hooks(p.model))
        limit = max(1, _MAX_LOGITS // max(1, getattr(p.model.cfg, "d_vocab", 1)))
        with torch.inference_mode(False):  # tensors of inference mode cannot be in a graph
            parts = parts_of(p.model, texts, padded=can_pad(reading, facts), together=together, limit=limit)
        for part in parts:
            for run in _differentiate(p, part, layers, draws, seed, metric, begin=facts.separate):
                predictions[run.rows] = run.n_predictions
                for name, hooks in changes.items():
                    slopes, squares = _looked(p, name, hooks, heads[name], run, by_position=by_position)
                    if metric is not None:
                        first[name][:, run.rows] = slopes
                    if draws:
                        curved[name][:, run.rows] = squares / 2 / run.n_predictions
            if bar is not None:
                bar.update((1 + draws + (metric is not None) + len(changes)) * len(part.rows))
    return Estimates(first, curved, predictions)


def _missing(*shape: int) -> Float64[Tensor, "head text"]:
    return torch.full(shape, torch.nan, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class _GroupRun:
    """The unmodified run of texts of one length, and its derivatives with respect to z.

    Attributes:
        rows: of the texts in the whole batch.
        tokens: their ids.
        z: the results of the heads, by layer.
        before: what the block before each of these layers returns, to begin there; empty to run all blocks.
        slopes: the gradient of the metric of each text, by layer; None without a metric.
        surprises: the gradient of ``-Σ log p(label)`` over the predictions that count, for each draw of labels, by
            layer.
        n_predictions: number of predictions of each text that count; 0 if the output is neither logits by token nor by
            text.
    """

    rows: list[int]
    tokens: Int[Tensor, "text pos"]
    z: dict[int, Results]
    before: dict[int, Any]
    slopes: dict[int, Results] | None
    surprises: dict[int, Float[Tensor, "draw text pos head size"]]
    n_predictions: Float64[Tensor, " text"]


def _looked(
    p: Pass, name: str, hooks: Hooks, heads: Sequence[Head], run: _GroupRun, *, by_position: bool
) -> tuple[Float64[Tensor, "head text"], Float64[Tensor, "head text"]]:
    """Return the first order of each head under hooks, and the mean over draws of ``(s · δ)²``."""
    slopes, squares = (_missing(len(heads), len(run.rows)) for _ in range(2))

    def see(layer: int, z: Tensor) -> None:
        of_layer = [n for n, (other, _) in enumerate(heads) if other == layer]
        numbers = [heads[n][1] for n in of_layer]
        change = z[:, :, numbers].double() - run.z[layer][:, :, numbers].double()
        if run.slopes is not None:
            gradient = run.slopes[layer][:, :, numbers].double()
            slopes[of_layer] = torch.einsum("tphd,tphd->ht", gradient, change).cpu()
        if layer in run.surprises:
            gradients = run.surprises[layer][:, :, :, numbers].double()
            products = torch.einsum("gtphd,tphd->gpht", gradients, change)
            parts = products if by_position else products.sum(1, keepdim=True)
            squares[of_layer] = parts.square().sum(1).mean(0).cpu()

    try:
        for layers in [[layer] for layer in run.z] if run.before else [list(run.z)]:
            own = hooks.of_heads(head for head in heads if head[0] in layers)
            z = {layer: run.z[layer] for layer in layers}
            look(p, run.tokens, own, z, see, run.before.get(layers[0]))
    except ValueError as error:
        raise ArgumentError("interventions", f"must fit the texts; {name!r}: {error}") from error
    return slopes, squares


# --- gradients


@dataclass(frozen=True, eq=False)
class _Graph:
    """One run of a batch with its graph.

    Attributes:
        output: what the model returns.
        unembedded: what the unembedding receives; None if it did not run.
        z: the results of the heads, by layer; the graph begins at the first.
        before: what the block before each layer returns, without its graph.
    """

    output: Any
    unembedded: Any
    z: dict[int, Results]
    before: dict[int, Any]


def _differentiate(
    p: Pass, part: Part, layers: Sequence[int], draws: int, seed: int, metric: Metric | None, *, begin: bool
) -> Iterator[_GroupRun]:
    """Run a part and differentiate it with respect to z.

    Labels are drawn by inverting the distribution of the predictions, so that a seed gives the same on every device.
    """
    with with_gradients(p.model):
        graphs = [_graph(p, batch, layers) for batch in part.batches]
        results = [z for graph in graphs for z in graph.z.values()]
        outputs = part.of_groups([graph.output for graph in graphs])
        logits = [_logits(x, group.tokens) for x, group in zip(outputs, part.texts.groups, strict=True) if draws]
        log_p = [clean_log_probabilities(x) for x in logits]
        slopes = None if metric is None else _gradients(_sum_of(metric, part, outputs), results, keep=draws > 0)
        labels = [
            _labels(part, group, output, x, draws, seed)
            for x, output, group in zip(log_p, outputs, part.texts.groups, strict=bool(draws))
        ]
        surprises = [*_surprise_gradients(p.model, part, graphs, log_p, labels, results)]
    numbers = iter(range(len(results)))
    predictions = n_predictions(outputs, part.texts)
    for graph, batch in zip(graphs, part.batches, strict=True):
        of_batch = {layer: next(numbers) for layer in graph.z}
        for group, place in zip(batch.groups, batch.places, strict=True):
            length = group.tokens.shape[1]
            here = (place, slice(length))
            yield _GroupRun(
                [part.rows[row] for row in group.rows.tolist()],
                group.tokens,
                {layer: z.detach()[here] for layer, z in graph.z.items()},
                {layer: of_texts(x, here) for layer, x in graph.before.items() if begin},
                None if slopes is None else {layer: slopes[n][here] for layer, n in of_batch.items()},
                {layer: torch.stack([x[n][here] for x in surprises]) for layer, n in of_batch.items() if surprises},
                predictions[group.rows.cpu()],
            )


def _graph(p: Pass, batch: Batch, layers: Sequence[int]) -> _Graph:
    """Run the model once, with a graph that begins at the first z."""
    z_by_layer: dict[int, Results] = {}

    def record(layer: int, z: Tensor) -> Tensor:
        z_by_layer[layer] = z if z_by_layer and z.requires_grad else z.detach().requires_grad_()
        return z_by_layer[layer]

    hooks = [at_results(layer, p.model.cfg.n_heads, partial(record, layer)) for layer in layers]
    blocks = {layer: p.model.blocks[layer - 1] for layer in layers if layer}
    unembed = getattr(p.model, "unembed", None)
    with p.keeping([*blocks.values()]) as kept, p.receiving([unembed] if unembed else []) as received:
        output = p.run(batch.tokens, hooks, gradients=True)
    if missing := [layer for layer in layers if layer not in z_by_layer]:
        raise RuntimeError(f"hook_z of layer {missing[0]} did not fire")
    before = {layer: _detached(kept[block]) for layer, block in blocks.items()}
    return _Graph(output, received.get(unembed), z_by_layer, before)


def _detached(output: Any) -> Any:
    """Drop the graph of what a block returned: a tensor, or several."""
    if isinstance(output, (tuple, list)):
        return type(output)(_detached(x) for x in output)
    return output.detach() if isinstance(output, Tensor) else output


def _gradients(
    value: Any, results: Sequence[Tensor], upstream: Sequence[Tensor] | None = None, *, keep: bool
) -> list[Tensor]:
    """Differentiate with respect to all z; 0 where z does not reach the value."""
    gradients = torch.autograd.grad(value, results, upstream, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(z) if x is None else x for x, z in zip(gradients, results, strict=True)]


def _sum_of(metric: Metric, part: Part, outputs: list[Any]) -> Tensor:
    """Compute the sum of a metric over texts, with its graph."""
    own = metric.of_rows(part.rows) if isinstance(metric, LogitDifference) else metric
    value, n_texts = values_of(own, outputs, part.texts), len(part.rows)
    as_numbers(value, n_texts)  # raises for what is not a number or one per text
    if not isinstance(value, Tensor):
        raise ArgumentError("metric", f"must return a tensor to be differentiated, got {shown(value)}")
    if not value.requires_grad:
        raise ArgumentError(
            "metric",
            "must be differentiable: it returned a number that does not depend on the heads' results by torch "
            "operations that record gradients (no .item(), no .detach(), no NumPy)",
        )
    return n_texts * value.double().mean()


def _logits(output: Any, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text prediction option"]:
    logits = logits_of(output, tokens)
    if logits is None:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ArgumentError(
            "draws",
            "must be 0 for a model that returns neither logits (batch, pos, vocabulary) nor (batch, classes), got "
            f"{got}: no labels can be drawn from its predictions",
        )
    return logits


# --- labels


def _labels(
    part: Part, group: TextGroup, output: Tensor, log_p: Tensor, draws: int, seed: int
) -> Int[Tensor, "draw text prediction"]:
    """Draw labels of a group's predictions; -1 where these do not count."""
    uniforms = _uniforms(part, group.rows, group.tokens.shape[1], log_p.shape[1], draws, seed)
    return drawn_labels(log_p, uniforms).masked_fill(~counted_in(output, group).to(log_p.device), -1)


def _uniforms(
    part: Part, rows: Int[Tensor, " text"], n_tokens: int, n_predictions: int, draws: int, seed: int
) -> Float64[Tensor, "draw text prediction"]:
    """Draw numbers in [0, 1) for each text of a group, which depend on the seed and its row in the batch alone."""
    generators = [np.random.default_rng((seed, part.rows[row])) for row in rows.tolist()]
    drawn = [generator.random((draws, n_tokens))[:, :n_predictions] for generator in generators]
    return torch.as_tensor(np.stack(drawn, 1))


def drawn_labels(
    log_p: Float[Tensor, "text prediction option"], uniforms: Float64[Tensor, "draw text prediction"]
) -> Int[Tensor, "draw text prediction"]:
    """Draw labels from predictions by inverting their cumulative distribution, in float64, some at a time."""
    n, labels = max(1, _MAX_PROBABILITIES // (len(log_p) * log_p.shape[-1])), list[Tensor]()
    for first in range(0, log_p.shape[1], n):
        cumulative = log_p[:, first : first + n].detach().double().exp().cumsum(-1)
        quantiles = uniforms[:, :, first : first + n].movedim(0, -1).to(cumulative).contiguous()
        drawn = torch.searchsorted(cumulative, quantiles * cumulative[..., -1:], right=True)
        labels.append(drawn.clamp_max(log_p.shape[-1] - 1).movedim(-1, 0))
    return torch.cat(labels, -1)


def _surprise_gradients(
    model: Any,
    part: Part,
    graphs: Sequence[_Graph],
    log_p: Sequence[Float[Tensor, "_text _prediction option"]],
    labels: Sequence[Int[Tensor, "draw _text _prediction"]],
    results: Sequence[Tensor],
) -> Iterator[list[Tensor]]:
    """Yield the gradients of ``-Σ log p(label)`` with respect to all z, for each draw of labels."""
    n_draws = len(labels[0]) if labels else 0
    shared = _shared_by_draws(model, part, graphs, log_p, labels) if n_draws > 2 else None
    unembedded = [graph.unembedded for graph in graphs]
    for draw in range(n_draws):
        keep = draw < n_draws - 1
        if shared is None:
            yield _gradients(_surprise(log_p, labels, draw), results, keep=keep)
        else:
            rows = _label_vectors(model, part, graphs, labels, draw)
            upstream = [x - own for x, own in zip(shared, rows, strict=True)]
            yield _gradients(unembedded, results, upstream, keep=keep)


def _surprise(log_p: Sequence[Tensor], labels: Sequence[Tensor], draw: int) -> Tensor:
    drawn = [(x, y[draw, ..., None]) for x, y in zip(log_p, labels, strict=True)]
    surprises = [-x.gather(-1, y.clamp_min(0)).where(y >= 0, 0.0).sum() for x, y in drawn]
    return sum(surprises[1:], surprises[0])


def _shared_by_draws(
    model: Any, part: Part, graphs: Sequence[_Graph], log_p: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[Float[Tensor, "text pos d_model"]] | None:
    """Return the part that all draws share of the gradients with respect to what the unembedding receives.

    Of a linear unembedding these gradients are ``Σ p W_U - W_U[label]``. The sum over the vocabulary, which may cost
    more than all layers, is the same for all draws. Two draws show whether the unembedding is linear, as none with a
    soft cap is; None if it is not.
    """
    weights, inputs = getattr(model, "W_U", None), [graph.unembedded for graph in graphs]
    if not isinstance(weights, Tensor) or weights.is_meta or user_hooks(model):
        return None
    if not all(_is_wide(x) and x.shape[2:] == weights.shape[:1] for x in inputs):
        return None
    first, second = (torch.autograd.grad(_surprise(log_p, labels, draw), inputs, retain_graph=True) for draw in (0, 1))
    own = [_label_vectors(model, part, graphs, labels, draw) for draw in (0, 1)]
    shared = [x + y for x, y in zip(first, own[0], strict=True)]
    return shared if all(same(x - y, z) for x, y, z in zip(shared, own[1], second, strict=True)) else None


def _label_vectors(
    model: Any, part: Part, graphs: Sequence[_Graph], labels: Sequence[Tensor], draw: int
) -> list[Float[Tensor, "text pos d_model"]]:
    """Return the unembedding vectors of one draw's labels for each batch, and zeros where no prediction counts."""
    of_groups, vectors = iter(labels), list[Tensor]()
    for graph, batch in zip(graphs, part.batches, strict=True):
        own: Tensor = torch.zeros_like(graph.unembedded)
        for place in batch.places:
            y = next(of_groups)[draw].to(model.W_U.device)
            rows = model.W_U.detach()[:, y.clamp_min(0)].movedim(0, -1)
            own[place, : y.shape[1]] = rows.where(y[..., None] >= 0, 0.0).to(own)
        vectors.append(own)
    return vectors


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3 and x.requires_grad and x.dtype in (torch.float32, torch.float64)
