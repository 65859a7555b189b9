"""Attribution of the loss to the additive components of scores: Shapley values, and one backward pass for all heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from math import factorial
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Layers, any_heads, joined, layer_hooks
from tl_posdisent.hooks.score_components import Part, split_scores
from tl_posdisent.models.reading.forward import evaluating, output_of
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.own_sums import with_gradients
from tl_posdisent.utils.validation import check_choice

from .metrics import Metric, as_numbers, check_metric, next_token_loss, values_of

_COMPONENTS: tuple[Part, ...] = get_args(Part)
Measured = Literal["loss", "kl"]


def shapley_values(table: pd.DataFrame, measured: Measured = "loss") -> pd.DataFrame:
    """Attribute the loss to the four components of the scores: exact Shapley values from ``additive_substitution``.

    That table has the loss ``v(S)`` with each subset ``S`` of distance, query, key and residual kept in all layers. The
    Shapley value of a component is the change of the loss when it is added, averaged over all orders in which the four
    can be added::

        value(p) = Σ_S |S|! (3 - |S|)! / 4! · (v(S ∪ {p}) - v(S)),    S without p

    The four add up to ``v(all) - v(none)``: the loss of the unmodified model minus that of uniform attention.

    Args:
        table: what ``additive_substitution`` returned, with either additive model.
        measured: ``"loss"``, or ``"kl"``, the divergence of the predictions.

    Returns:
        One row per component: ``component``; ``value``, nats per token, negative where it lowers the loss; ``first``
        and ``last``, the change if it is added to none and to all of the others (where these differ, components
        interact).

    Raises:
        ValueError: a table without a row, or with several rows, for some subset; an unknown ``measured``.

    Example:
        >>> from tl_posdisent import additive_substitution, demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import shapley_values
        >>> table = additive_substitution(load_demo_model(), demo_tokens(length=64), layers=[3, 4], progress=False)
        >>> values = shapley_values(table).set_index("component")["value"]
        >>> values.idxmin()  # it lowers the loss most
        'residual'
    """
    check_choice("measured", measured, get_args(Measured))
    needed = {"scope", "put_in", "keep", measured}
    if not isinstance(table, pd.DataFrame) or not needed <= set(table.columns):
        got = list(table.columns) if isinstance(table, pd.DataFrame) else type(table).__name__
        raise ValueError(f"table must be what additive_substitution returned, got {got}")
    runs = table[(table["scope"] == "all") & (table["put_in"] == "fit")]
    kept = [frozenset() if keep == "mean" else frozenset(str(keep).split("+")) for keep in runs["keep"]]
    wanted = {frozenset(some) for n in range(len(_COMPONENTS) + 1) for some in combinations(_COMPONENTS, n)}
    if set(kept) != wanted or len(kept) != len(wanted):
        raise ValueError(
            f'table must have one row for each of the {len(wanted)} subsets of components (scope "all", put_in "fit"), '
            f"got {len(kept)} rows for {len(set(kept) & wanted)} of them"
        )
    values = dict(zip(kept, map(float, runs[measured]), strict=True))
    rows = []
    for component in _COMPONENTS:
        gains = {some: values[some | {component}] - values[some] for some in wanted if component not in some}
        value = sum(gain * factorial(len(some)) * factorial(3 - len(some)) for some, gain in gains.items()) / 24
        others = frozenset(_COMPONENTS) - {component}
        rows.append((component, value, gains[frozenset()], gains[others]))
    return pd.DataFrame(rows, columns=["component", "value", "first", "last"])


def component_attribution(
    model: Any,
    tokens: Tokens,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> pd.DataFrame:
    """Attribute a metric to the additive components of all heads' scores by one backward pass.

    Scores are a sum of ``mean``, ``distance``, ``query``, ``key`` and ``residual`` (the three-axis fit of each text and
    head, in the gauge of ``AdditiveFit``). With the gradient of the metric by a head's scores, and a component of
    these::

        value(component) = Σ_{i,j} ∂metric/∂scores[i, j] · component[i, j]

    It is the rate at which the metric changes as this component is scaled up in this head, and ``-value`` the
    first-order estimate of what dropping it would change, which is poor for large ones (``drop_component`` measures it,
    one pass for each). A softmax ignores what depends on the query alone: ``mean`` and ``query`` have value 0, except
    beside an attention sink.

    One forward and one backward pass for each length of text, whose activations and scores are held. The parameters'
    ``grad`` and ``requires_grad`` do not change.

    Args:
        model, tokens, attention_mask, layers, heads: as in ``head_ablation``.
        metric: as there, but differentiable (torch functions of the logits): default the mean loss of
            each text's next tokens, in nats; or ``logit_difference``.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``mean``, ``distance``, ``query``, ``key``, ``residual``, in
        the metric's unit; they add up to Σ gradient · score.

    Raises:
        ValueError: a layer whose scores cannot be changed; a metric that is not differentiable; what ``head_ablation``
            refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import component_attribution
        >>> table = component_attribution(load_demo_model(), demo_tokens(length=64))
        >>> total = table[["distance", "query", "key", "residual"]].sum()
        >>> bool(abs(total["query"]) < 1e-3), bool(total["distance"] < 0)  # the distance component lowers the loss
        (True, True)
    """
    check_metric(metric)
    reading = read_model(model, layers)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    with torch.inference_mode(False):  # whose tensors cannot be differentiated with
        texts = read_texts(model, tokens.clone() if isinstance(tokens, Tensor) else tokens, attention_mask)
    taps = [[_Tap(spec.layer) for spec, _ in chosen] for _ in texts.groups]
    outputs = []
    with with_gradients(model), evaluating(model):
        for group, of_group in zip(texts.groups, taps, strict=True):
            added = joined(
                layer_hooks(spec, some, ScoreEdit("component_attribution", tap.add_zero, Order.COMPONENT, scores=True))
                for tap, (spec, some) in zip(of_group, chosen, strict=True)
            )
            with applied(model, added):
                outputs.append(output_of(model, group.tokens))
        values = values_of(metric, outputs, texts)
        as_numbers(values, len(texts.tokens))
        if not isinstance(values, Tensor) or not values.requires_grad:
            raise ValueError(
                "metric must be differentiable: return a tensor made of the logits by torch functions (without "
                ".item(), .detach() or argmax), got one without gradients"
            )
        deltas = [tap.delta for of_group in taps for tap in of_group]
        gradients = iter(torch.autograd.grad(values.double().mean(), deltas, allow_unused=True))
    sums = [[tap.products(next(gradients)) for tap in of_group] for of_group in taps]
    rows = []
    for n, (spec, some) in enumerate(chosen):
        components = torch.stack([of_group[n] for of_group in sums]).sum(0)
        rows += [(spec.layer, head, *own) for head, own in zip(some, components.T.tolist(), strict=True)]
    return reading.note(pd.DataFrame(rows, columns=["layer", "head", "mean", *_COMPONENTS]))


@dataclass(eq=False)
class _Tap:
    """The scores of some heads of one layer, and a zero added to them, by which the metric is differentiated."""

    layer: int
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add_zero(self, view: View) -> Tensor:
        scores = view.scores()
        delta = torch.zeros_like(scores, requires_grad=True)
        self.seen.append((scores.detach().clone(), view.inside, delta))
        return scores + delta

    @property
    def delta(self) -> Tensor:
        if len(self.seen) != 1:
            raise RuntimeError(f"the scores of layer {self.layer} were computed {len(self.seen)} times in one run")
        return self.seen[0][2]

    def products(self, gradient: Float[Tensor, "batch head query key"] | None) -> Float[Tensor, "component head"]:
        """Σ gradient · component for each component and head, in float64."""
        scores, inside, delta = self.seen.pop()
        slope = torch.where(inside, torch.zeros_like(delta) if gradient is None else gradient, 0.0).double()
        components = split_scores(scores, inside)
        return torch.stack([(slope * components[name]).sum((0, 2, 3)) for name in ("mean", *_COMPONENTS)]).cpu()
