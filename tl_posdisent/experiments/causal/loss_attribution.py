"""Attribution of the loss to the additive components of scores: Shapley values, and one backward pass for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import factorial
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Layers, any_heads, joined, layer_hooks
from tl_posdisent.hooks.score_components import Part, split_scores
from tl_posdisent.models.reading.forward import Hook, evaluating, output_of
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.validation import check_choice

from .metrics import Metric, as_number, check_metric, next_token_loss, values_of

_COMPONENTS: tuple[Part, ...] = get_args(Part)
Measured = Literal["loss", "kl"]


def shapley_values(table: pd.DataFrame, measured: Measured = "loss") -> pd.DataFrame:
    """Attribute the loss to the four components of the scores: exact Shapley values from ``additive_substitution``.

    That table has the loss ``v(S)`` with each subset ``S`` of distance, query, key and residual kept in all layers. The
    Shapley value of a component is the change of the loss when it is added, averaged over all orders in which the four
    can be added::

        value(p) = Σ_S |S|! (3 - |S|)! / 4! · (v(S ∪ {p}) - v(S)),    S without p

    The four values add up to ``v(all) - v(none)``: the loss of the unmodified model minus that of uniform attention.

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
    values = _subset_values(table, measured)
    rows = []
    for component in _COMPONENTS:
        others = [other for other in _COMPONENTS if other != component]
        gains = {
            frozenset(some): values[frozenset({*some, component})] - values[frozenset(some)]
            for n in range(len(_COMPONENTS))
            for some in combinations(others, n)
        }
        value = sum(_order_share(len(some)) * gain for some, gain in gains.items())
        rows.append((component, value, gains[frozenset()], gains[frozenset(others)]))
    return pd.DataFrame(rows, columns=["component", "value", "first", "last"])


def _order_share(before: int) -> float:
    """The fraction of orders in which a component comes right after a given set of so many others."""
    return factorial(before) * factorial(len(_COMPONENTS) - 1 - before) / factorial(len(_COMPONENTS))


def _subset_values(table: Any, measured: str) -> dict[frozenset[str], float]:
    """The loss with each subset of the components."""
    needed = {"scope", "put_in", "keep", measured}
    if not isinstance(table, pd.DataFrame) or not needed <= set(table.columns):
        got = list(table.columns) if isinstance(table, pd.DataFrame) else type(table).__name__
        raise ValueError(f"table must be what additive_substitution returned, got {got}")
    runs = table[(table["scope"] == "all") & (table["put_in"] == "fit")]
    named = [frozenset() if keep == "mean" else frozenset(str(keep).split("+")) for keep in runs["keep"]]
    wanted = {frozenset(some) for n in range(len(_COMPONENTS) + 1) for some in combinations(_COMPONENTS, n)}
    if set(named) != wanted or len(named) != len(wanted):
        raise ValueError(
            f'table must have one row for each of the {len(wanted)} subsets of components (scope "all", put_in "fit"), '
            f"got {len(named)} rows for {len(set(named) & wanted)} of them"
        )
    return dict(zip(named, map(float, runs[measured]), strict=True))


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

    One forward and one backward pass for each length of text, whose activations and scores are held. Neither the
    parameters' ``grad`` nor their ``requires_grad`` changes. Hooks of your own on the model act.

    Args:
        model, tokens, attention_mask, layers, heads: as in ``head_ablation``.
        metric: as there, but differentiable (torch functions of the logits): default the mean loss of
            each text's next tokens, in nats; or ``logit_difference``.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``mean``, ``distance``, ``query``, ``key``, ``residual``, in
        the metric's unit; they add up to Σ gradient · score.

    Raises:
        ValueError: a layer whose scores cannot be changed; a metric that is not differentiable or returns anything but
            finite numbers; unusable tokens, layers or heads.

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
    texts = read_texts(model, tokens, attention_mask)
    taps = [[_Tap(spec.layer) for spec, _ in chosen] for _ in texts.groups]
    hooks = [
        joined(layer_hooks(spec, some, tap.edit) for tap, (spec, some) in zip(of_group, chosen, strict=True))
        for of_group in taps
    ]
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        outputs = [_output(model, group, some) for group, some in zip(texts.groups, hooks, strict=True)]
        value = _differentiable(values_of(metric, outputs, texts), texts)
        deltas = [tap.delta for of_group in taps for tap in of_group]
        gradients = iter(torch.autograd.grad(value, deltas, allow_unused=True))
    rows = []
    sums = [[tap.products(next(gradients)) for tap in of_group] for of_group in taps]
    for n, (spec, some) in enumerate(chosen):
        components = sum(of_group[n] for of_group in sums)
        assert isinstance(components, Tensor)
        rows += [(spec.layer, head, *own) for head, own in zip(some, components.T.tolist(), strict=True)]
    return reading.note(pd.DataFrame(rows, columns=["layer", "head", "mean", *_COMPONENTS]))


@dataclass(eq=False)
class _Tap:
    """The scores of some heads of one layer, and a zero added to them, by which the metric is differentiated."""

    layer: int
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @property
    def edit(self) -> ScoreEdit:
        return ScoreEdit("component_attribution", self.add_zero, Order.COMPONENT, scores=True)

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
        scores, inside, _ = self.seen.pop()
        if gradient is None:
            return torch.zeros(1 + len(_COMPONENTS), scores.shape[1], dtype=torch.float64)
        return _weighted(split_scores(scores, inside), gradient, inside).cpu()


def _weighted(components: dict[str, Tensor], gradient: Tensor, inside: Bool[Tensor, "*lead query key"]) -> Tensor:
    slope = torch.where(inside, gradient.double(), 0.0)
    return torch.stack([(slope * components[name]).sum((0, 2, 3)) for name in ("mean", *_COMPONENTS)])


def _output(model: Any, group: TextGroup, hooks: Sequence[Hook]) -> Any:
    with applied(model, hooks):
        return output_of(model, group.tokens)


def _differentiable(values: Any, texts: Texts) -> Tensor:
    """What a metric returned, as one number with gradients."""
    as_number(values, len(texts.tokens))
    if not isinstance(values, Tensor) or not values.requires_grad:
        raise ValueError(
            "metric must be differentiable: return a tensor made of the logits by torch functions (without .item(), "
            ".detach() or argmax), got one without gradients"
        )
    return values.double().mean()
