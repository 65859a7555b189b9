"""Gradients of a metric, and of the surprise at drawn labels, with respect to the results of attention heads.

The result z of a layer's heads (``hook_z``) is the only thing that is differentiated: no parameter gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities
from tl_posdisent.models.running.forward_pass import Pass, running, with_gradients
from tl_posdisent.models.running.partial_forward import has_hooks
from tl_posdisent.models.running.results import at_results
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch

_MAX_PROBABILITIES = 2**22  # number of probabilities accumulated at a time

LayerTensors = dict[int, Tensor]
"""A tensor of each layer."""


@dataclass(frozen=True, eq=False)
class ResultGradients:
    """One unmodified run of texts of equal length, and its derivatives with respect to the z of each layer.

    Attributes:
        z: results of the heads, by layer, ``[text, pos, head, d_head]``.
        before: what the block before each layer returned; a later run can begin there.
        metric: gradient of the metric, by layer, in the shape of z.
        surprise: for each draw of labels, the gradient of ``-Σ log p(label)`` over the predictions, by layer.
        n_predictions: number of predictions of each text; 0 if the output is neither logits by token nor by text.
    """

    z: LayerTensors
    before: dict[int, Any]
    metric: LayerTensors
    surprise: list[LayerTensors]
    n_predictions: int


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of texts of equal length with its graph.

    Attributes:
        output: what the model returns.
        unembedded: what the unembedding receives; None if it did not run.
        z: results of the heads, by layer; the graph begins at the first.
        before: what the block before each layer returned, without its graph.
    """

    output: Any
    unembedded: Any
    z: LayerTensors
    before: dict[int, Any]


def result_gradients(
    model: Any,
    groups: Sequence[Int[Tensor, "text pos"]],
    layers: Sequence[int],
    metric: Callable[[list[Any]], Tensor],
    uniforms: Sequence[Float64[Tensor, "draw text pos"]],
) -> list[ResultGradients]:
    """Run the model on groups of texts of equal length, and differentiate with respect to z.

    Labels are drawn from the model's own predictions by inversion of their distribution, so that a seed gives the same
    labels on every device. The gradient s of their surprise has expectation 0, and ``(s · δ)²`` has the expectation
    ``δᵀ F δ``, where F is the Fisher information of the predictions with respect to z.

    Args:
        layers: layers whose z is differentiated.
        metric: from the outputs of all groups to one number, with its graph.
        uniforms: for each group, numbers in [0, 1), from which the labels are drawn; none for no draws.

    Returns:
        One ``ResultGradients`` for each group.

    Raises:
        ValueError: an output without gradients, or one from which no labels can be drawn.
    """
    with running(model) as p, with_gradients(model):
        runs = [_recorded(p, tokens, layers) for tokens in groups]
        results = [z for run in runs for z in run.z.values()]
        value = metric([run.output for run in runs])
        if not value.requires_grad:
            raise ArgumentError(
                "metric",
                "must be differentiable: it returned a number that does not depend on the heads' results by torch "
                "operations that record gradients (no .item(), no .detach(), no NumPy)",
            )
        n_draws = len(uniforms[0])
        gradients = [_gradients(value, results, keep=n_draws > 0)]
        log_p = [_required_predictions(run.output, tokens) for run, tokens in zip(runs, groups, strict=True) if n_draws]
        labels = [drawn_labels(x, u) for x, u in zip(log_p, uniforms, strict=bool(n_draws))]
        shared = _shared_unembedding_gradients(model, runs, log_p, labels)
        for draw in range(n_draws):
            keep = draw < n_draws - 1
            if shared is None:
                gradients.append(_gradients(_surprise(log_p, labels, draw), results, keep=keep))
            else:
                upstream = _unembedding_gradients(model, shared, labels, draw)
                gradients.append(_gradients([run.unembedded for run in runs], results, upstream, keep=keep))
    return [_group_gradients(runs, gradients, n, tokens) for n, tokens in enumerate(groups)]


def _recorded(p: Pass, tokens: Tensor, layers: Sequence[int]) -> _Run:
    """Run the model once, with a graph that begins at the first z."""
    z_by_layer: LayerTensors = {}
    hooks = [at_results(layer, p.model.cfg.n_heads, partial(_record_z, z_by_layer, layer)) for layer in layers]
    blocks = {layer: p.model.blocks[layer - 1] for layer in layers if layer}
    unembed = getattr(p.model, "unembed", None)
    with p.keeping(list(blocks.values())) as kept, p.receiving([unembed] if unembed else []) as received:
        output = p.run(tokens, hooks, gradients=True)
    if missing := [layer for layer in layers if layer not in z_by_layer]:
        raise RuntimeError(f"hook_z of layer {missing[0]} did not fire")
    before = {layer: _detached(kept[block]) for layer, block in blocks.items()}
    return _Run(output, received.get(unembed), z_by_layer, before)


def _record_z(z_by_layer: LayerTensors, layer: int, z: Tensor) -> Tensor:
    """Record a layer's z, and return it; the first one begins the graph."""
    z_by_layer[layer] = z if z_by_layer and z.requires_grad else z.detach().requires_grad_()
    return z_by_layer[layer]


def _detached(output: Any) -> Any:
    """Drop the graph of what a block returned: a tensor, or several."""
    if isinstance(output, (tuple, list)):
        return type(output)(_detached(x) for x in output)
    return output.detach() if isinstance(output, Tensor) else output


def _surprise(
    log_p: Sequence[Float[Tensor, "text prediction option"]],
    labels: Sequence[Int[Tensor, "draw text prediction"]],
    draw: int,
) -> Tensor:
    """Compute ``-Σ log p(label)`` over all predictions of all groups, for one draw of labels."""
    surprises = [-x.gather(-1, y[draw, ..., None]).sum() for x, y in zip(log_p, labels, strict=True)]
    return sum(surprises[1:], surprises[0])


def _shared_unembedding_gradients(
    model: Any, runs: Sequence[_Run], log_p: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[Float[Tensor, "text pos d_model"]] | None:
    """Return the part that all draws share of the gradients with respect to what the unembedding receives.

    Of a linear unembedding these gradients are ``Σ p W_U - W_U[label]``. The sum over the vocabulary, which may cost
    more than all layers, is the same for all draws. Two draws show whether the unembedding is linear, as none with a
    soft cap is; None if it is not, or if there are too few draws to profit.
    """
    weights, n_draws = getattr(model, "W_U", None), len(labels[0]) if labels else 0
    if n_draws < 3 or has_hooks(model) or not isinstance(weights, Tensor) or weights.is_meta:
        return None
    shapes = [(len(y[0]), y.shape[2] + 1, len(weights)) for y in labels]
    inputs = [run.unembedded for run in runs]
    if not all(_is_wide(x) and x.shape == shape for x, shape in zip(inputs, shapes, strict=True)):
        return None
    first, second = (torch.autograd.grad(_surprise(log_p, labels, draw), inputs, retain_graph=True) for draw in (0, 1))
    shared = [x + rows.to(x) for x, rows in zip(first, _label_rows(weights, labels, 0), strict=True)]
    predicted = _unembedding_gradients(model, shared, labels, 1)
    return shared if all(mismatch(x, y) <= 1 for x, y in zip(predicted, second, strict=True)) else None


def _unembedding_gradients(
    model: Any, shared: Sequence[Tensor], labels: Sequence[Tensor], draw: int
) -> list[Float[Tensor, "text pos d_model"]]:
    """Compute one draw's gradients with respect to what the unembedding receives, from the part that draws share."""
    return [x - rows.to(x) for x, rows in zip(shared, _label_rows(model.W_U, labels, draw), strict=True)]


def _label_rows(
    weights: Float[Tensor, "d_model vocab"], labels: Sequence[Tensor], draw: int
) -> list[Float[Tensor, "text pos d_model"]]:
    """Return the unembedding vectors of one draw's labels, and zeros at the last position, which predicts nothing."""
    return [pad(weights.detach()[:, y[draw].to(weights.device)].movedim(0, -1), (0, 0, 0, 1)) for y in labels]


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.dtype in (torch.float32, torch.float64)


def _gradients(
    value: Any, results: Sequence[Tensor], upstream: Sequence[Tensor] | None = None, *, keep: bool
) -> list[Tensor]:
    """Differentiate with respect to all z; 0 where z does not reach the value."""
    gradients = torch.autograd.grad(value, results, upstream, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(z) if x is None else x for x, z in zip(gradients, results, strict=True)]


def predictions(output: Any, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text prediction option"] | None:
    """Return the log-probabilities of a model's predictions: of all tokens but the first, or of each text's class.

    None for an output that is neither logits by token nor by text.
    """
    logits = _logits(output, tokens)
    return None if logits is None else as_log_probabilities(logits)


def _logits(output: Any, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text prediction option"] | None:
    if isinstance(output, Tensor) and output.is_floating_point() and output.shape[:1] == tokens.shape[:1]:
        if output.ndim == 3 and output.shape[1] == tokens.shape[1]:
            return output[:, :-1]
        if output.ndim == 2:
            return output[:, None]
    return None


def _required_predictions(output: Any, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text prediction option"]:
    log_p = predictions(output, tokens)
    if log_p is None:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ArgumentError(
            "draws",
            "must be 0 for a model that returns neither logits (batch, pos, vocabulary) nor (batch, classes), got "
            f"{got}: no labels can be drawn from its predictions",
        )
    return log_p


def drawn_labels(
    log_p: Float[Tensor, "text prediction option"], uniforms: Float64[Tensor, "draw text pos"]
) -> Int[Tensor, "draw text prediction"]:
    """Draw labels from predictions by inverting their cumulative distribution, in float64, some at a time."""
    n, labels = max(1, _MAX_PROBABILITIES // (len(log_p) * log_p.shape[-1])), list[Tensor]()
    for first in range(0, log_p.shape[1], n):
        cumulative = log_p[:, first : first + n].detach().double().exp().cumsum(-1)
        quantiles = uniforms[:, :, first : first + cumulative.shape[1]].movedim(0, -1).to(cumulative).contiguous()
        drawn = torch.searchsorted(cumulative, quantiles * cumulative[..., -1:], right=True)
        labels.append(drawn.clamp_max(log_p.shape[-1] - 1).movedim(-1, 0))
    return torch.cat(labels, -1)


def _group_gradients(
    runs: Sequence[_Run], gradients: Sequence[list[Tensor]], group: int, tokens: Int[Tensor, "text pos"]
) -> ResultGradients:
    """Select one group's gradients, which are in the order of the groups and their layers."""
    run, first = runs[group], sum(len(run.z) for run in runs[:group])
    logits = _logits(run.output, tokens)
    n_predictions = 0 if logits is None else logits.shape[1]
    metric, *surprise = [dict(zip(run.z, x[first : first + len(run.z)], strict=True)) for x in gradients]
    z = {layer: x.detach() for layer, x in run.z.items()}
    return ResultGradients(z, run.before, metric, surprise, n_predictions)
