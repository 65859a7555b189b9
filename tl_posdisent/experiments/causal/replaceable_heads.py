"""How many heads can be replaced together by simpler attention, and at which cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.experiments.causal.named_interventions import (
    Interventions,
    NamedIntervention,
    named_interventions,
    rows_by_layer,
)
from tl_posdisent.experiments.causal.runs import run_texts
from tl_posdisent.experiments.causal.token_losses import ByToken, Unmodified
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, joined
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import (
    check_counts,
    check_integer,
    check_number,
    check_seed,
    check_subset,
    head_label,
    listed,
    shown,
)

Order = Literal["first order", "random"]
_BESIDE: tuple[Order, ...] = ("random",)


@dataclass(frozen=True, eq=False, repr=False)
class ReplaceableHeads(HasTable):
    """Heads in the order in which they can be replaced, and the measured cost of replacing the first n.

    Attributes:
        order: one row per head, those that cost least first: ``rank`` (from 1), ``layer``, ``head``, ``intervention``
            (the one that replaces it), ``curvature``, ``curvature_se`` (estimated KL(unmodified ‖ replaced) of the
            head alone, nats per token).
        curve: one row per order and number of ``heads``: ``loss``, ``added_loss`` and its standard error ``se`` over
            blocks of the held-out texts, and ``kl``, in nats per predicted token. Rows of random orders are means over
            ``random_orders`` of them, and ``sd`` is the standard deviation of ``added_loss`` over these; it is NaN in
            other rows and for a single one.
        budget: largest added loss, nats per predicted token.
        n: the largest measured number of heads, in the order by curvature, of which no smaller one exceeds the budget.
    """

    order: pd.DataFrame
    curve: pd.DataFrame
    budget: float
    n: int

    def hooks(self, interventions: Mapping[str, Hooks] | Hooks, n: int | None = None) -> Hooks:
        """Return hooks that replace the first n heads of the order, by default as many as the budget allows.

        Args:
            interventions: the hooks that were given to ``replaceable_heads``, or others of the same names.
            n: number of heads.

        Raises:
            ValueError: n is larger than the number of heads; an intervention of the order is missing, or does not act
                on one of these heads.
        """
        n = self.n if n is None else check_integer("n", n, 0, len(self.order))
        names = self.order["intervention"].unique().tolist()
        given = {names[0]: interventions} if isinstance(interventions, Hooks) else interventions
        named = isinstance(given, Mapping) and all(isinstance(given.get(name), Hooks) for name in names)
        if not named:
            raise ArgumentError("interventions", f"must be the hooks of {', '.join(names)}, got {shown(interventions)}")
        _refuse_own(given[name] for name in names)
        first = self.order.iloc[:n]
        hooks = _replacing({name: NamedIntervention(name, given[name], {}) for name in names}, first)
        acting = {(x.spec.layer, head) for x in hooks.interventions for head in x.heads}
        for layer, head in zip(first["layer"], first["head"], strict=True):
            if (layer, head) not in acting:
                where = head_label(layer, int(head))
                raise ArgumentError(
                    "interventions", f"must act on the first {n} heads of the order, but none acts on {where}"
                )
        return hooks

    def plot(self, *, title: str | None = None) -> Any:
        """Plot the curve: see ``plot_replaced_heads``."""
        return public_name("viz", "plot_replaced_heads")(self, title=title)

    def to_frame(self) -> pd.DataFrame:
        """Return the curve."""
        return self.curve

    def __repr__(self) -> str:
        own = self.curve[self.curve["order"] == "curvature"].set_index("heads")
        cost = own.loc[self.n]
        spread = "" if np.isnan(cost["se"]) else f" ± {cost['se']:.3f}"
        most = f"{own.index.max()} replaced cost {own['added_loss'].iloc[-1]:.3f}"
        lines = [
            f"ReplaceableHeads: {self.n} of {len(self.order)} heads within {self.budget:g} nats per token",
            f"  measured on held-out texts: {self.n} replaced cost {cost['added_loss']:.3f}{spread}, {most}",
        ]
        random = self.curve[self.curve["order"] == "random"].set_index("heads")
        if len(random):
            n = min(random.index, key=lambda heads: abs(heads - len(self.order) / 2))
            sd = "" if np.isnan(random.loc[n, "sd"]) else f" (standard deviation over orders {random.loc[n, 'sd']:.3f})"
            lines.append(
                f"  {n} replaced: {own.loc[n, 'added_loss']:.3f}, in random order {random.loc[n, 'added_loss']:.3f}{sd}"
            )
        return "\n".join(lines)


def replaceable_heads(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    *,
    heldout: Tokens,
    attention_mask: Tensor | None = None,
    heldout_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    budget: float = 0.05,
    counts: Collection[int] | None = None,
    beside: Collection[Order] = _BESIDE,
    random_orders: int = 5,
    draws: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> ReplaceableHeads:
    """Order heads by the estimated cost of replacing each, and measure the cost of replacing the first n together.

    Each head is replaced by the one of ``interventions`` with the smallest curvature for it (``head_effects``), and
    heads with the smallest curvature come first. The sum of the curvatures does not predict the cost of many heads
    together, so the cost is measured, on other texts.

    The order by curvature answers which heads matter least to the predictions. ``"first order"`` is attribution
    patching: heads by the *size* of the first-order effect on the loss, |g · δ|, each replaced by the intervention of
    smallest size. Its sign, which says whether a small step raises or lowers the loss of these texts, is not a cost:
    heads with the most negative effects matter most. Random orders are the baseline of both.

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: texts by which heads are ordered, as in ``head_effects``.
        interventions: hooks of this package by name, or one list: what may replace heads, such as
            ``fitted_attention(model, other_texts)``. Fit it to texts other than ``tokens``.
        heldout: texts on which the cost is measured, other than ``tokens``.
        heldout_mask: the mask of ``heldout``.
        budget: largest added loss, nats per predicted token.
        counts: numbers of heads whose cost is measured; default every tenth of the heads, and further ones by bisection
            until the set within the budget is known to the head.
        beside: further orders whose cost is measured at ``counts``: ``"random"``, ``"first order"``.
        random_orders: number of random orders over which ``"random"`` is averaged.
        draws, seed: as in ``head_effects``; the seed also gives the random orders.

    Raises:
        ValueError: hooks of your own among the interventions; counts beyond the number of heads; what ``head_effects``
            refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, replaceable_heads
        >>> from tl_posdisent.hooks import fitted_attention
        >>> model, tokens = load_demo_model(), demo_tokens(length=768).view(12, 64)
        >>> static = fitted_attention(model, tokens[:6])
        >>> found = replaceable_heads(model, tokens[6:9], static, heldout=tokens[9:], budget=0.1, progress=False)
        >>> found
        ReplaceableHeads: ... of 40 heads within 0.1 nats per token
          measured on held-out texts: ... replaced cost ... ± ..., 40 replaced cost ...
          20 replaced: ..., in random order ... (standard deviation over orders ...)
        >>> model.run_with_hooks(tokens[9:], fwd_hooks=found.hooks(static)).shape
        torch.Size([3, 64, 1024])
    """
    budget = check_number("budget", budget, above=0)
    extra = check_subset("beside", beside, get_args(Order))
    check_integer("random_orders", random_orders, 1)
    check_seed(seed)
    layers, heads = listed("layers", layers), listed("heads", heads)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    found = named_interventions(model, interventions, rows_by_layer(reading, among), texts)
    _refuse_own(item.hooks for item in found)
    items = {item.name: item for item in found}
    with naming(tokens="heldout", attention_mask="heldout_mask"):
        measured = read_texts(model, heldout, heldout_mask)
    effects = head_effects(
        model,
        tokens,
        {name: item.hooks for name, item in items.items()},
        attention_mask=attention_mask,
        layers=layers,
        heads=heads,
        draws=check_integer("draws", draws, 1),
        exact=0,
        seed=seed,
        progress=progress,
    )
    by_curvature = _ordered(effects, effects["curvature"])
    n_heads = len(by_curvature)
    orders = {"curvature": [by_curvature]}
    if "first order" in extra:
        orders["first order"] = [_ordered(effects, effects["first"].abs())]
    if "random" in extra:
        generator = np.random.default_rng(seed)
        orders["random"] = [by_curvature.iloc[generator.permutation(n_heads)] for _ in range(random_orders)]
    sizes = _counts(counts, n_heads)
    runs: dict[frozenset[int], ByToken] = {}
    sets = {frozenset(order.index[:n]) for some in orders.values() for order in some for n in sizes}
    with running(model), progress_bar(total=len(sets), desc="sets", disable=not progress) as bar:
        unmodified = Unmodified.of(run_texts(model, measured), measured)

        def run(rows: pd.DataFrame) -> ByToken:
            """Run the held-out texts with these heads replaced; a set is run once, whatever its order."""
            replaced = frozenset(rows.index)
            if replaced not in runs:
                hooks = _replacing(items, rows)
                runs[replaced] = unmodified.compare(run_texts(model, measured, [hooks] * len(measured.groups)))
                bar.total = max(bar.total, len(runs))  # bisection adds sets
                bar.update()
            return runs[replaced]

        def cost(order: str, n: int) -> dict[str, float]:
            return _cost([run(rows.iloc[:n]) for rows in orders[order]], unmodified)

        n, tried = _within(lambda n: cost("curvature", n)["added_loss"], sizes, budget, search=counts is None)
        places = [("curvature", n) for n in tried]
        places += [(name, n) for name in orders if name != "curvature" for n in sizes]
        curve = pd.DataFrame([{"order": name, "heads": n, **cost(name, n)} for name, n in places])
    order = by_curvature.reset_index(drop=True)
    columns = ["layer", "head", "intervention", "curvature", "curvature_se"]
    order = order[columns].assign(rank=range(1, n_heads + 1))[["rank", *columns]]
    return ReplaceableHeads(order, curve, budget, n)


def _refuse_own(interventions: Iterable[Hooks]) -> None:
    """Raise for user hooks, which cannot be restricted to single heads."""
    if own := [hooks for hooks in interventions if hooks.others]:
        raise ArgumentError(
            "interventions", f"must be hooks of this package alone, got functions of your own in {shown(own[0])}"
        )


def _ordered(effects: pd.DataFrame, sizes: pd.Series) -> pd.DataFrame:
    """Sort heads by the smallest of their sizes under any intervention, and keep the row of that intervention."""
    return effects.loc[sizes.sort_values(kind="stable").index].drop_duplicates(["layer", "head"])


def _cost(runs: Sequence[ByToken], unmodified: Unmodified) -> dict[str, float]:
    """Average the runs of several orders: the loss, what is added to it, its errors, and the divergence."""
    losses = torch.stack([run.losses for run in runs])
    added = losses - unmodified.losses
    mean, error = unmodified.blocks.mean(added.mean(0))
    sd = added.mean(1).std().item() if len(runs) > 1 else nan
    kl = torch.stack([run.divergences for run in runs]).mean().item()
    return {"loss": losses.mean().item(), "added_loss": mean, "se": error, "sd": sd, "kl": kl}


def _counts(counts: Any, n_heads: int) -> list[int]:
    if counts is None:
        return sorted({round(n_heads * tenth / 10) for tenth in range(11)})
    return [0, *check_counts(counts, n_heads)]


def _replacing(items: dict[str, NamedIntervention], rows: pd.DataFrame) -> Hooks:
    """Return hooks that replace the heads of these rows."""
    chosen: dict[tuple[str, int], list[int]] = {}
    for name, layer, head in zip(rows["intervention"], rows["layer"], rows["head"], strict=True):
        chosen.setdefault((name, layer), []).append(int(head))
    return joined(items[name].of(layer, heads) for (name, layer), heads in chosen.items())


def _within(
    cost: Callable[[int], float], sizes: Sequence[int], budget: float, *, search: bool
) -> tuple[int, list[int]]:
    """Find the largest measured number of heads below the first that exceeds the budget, by bisection if ``search``.

    Returns:
        That number, and all numbers that were measured.
    """
    costs = {size: cost(size) for size in sizes}
    above = next((size for size in sizes if costs[size] > budget), None)
    if above is None:
        return sizes[-1], sorted(costs)
    below = max(size for size in sizes if size < above)
    while search and above - below > 1:
        middle = (below + above) // 2
        costs[middle] = cost(middle)
        if costs[middle] > budget:
            above = middle
        else:
            below = middle
    return below, sorted(costs)
