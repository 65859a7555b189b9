"""How many heads can be replaced together by simpler attention, and at which cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from torch import Tensor

from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.experiments.causal.named_interventions import (
    Interventions,
    NamedIntervention,
    named_interventions,
    rows_by_layer,
)
from tl_posdisent.experiments.causal.runs import run_texts
from tl_posdisent.experiments.causal.token_losses import Unmodified
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, joined
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, check_subset, head_label, shown

Order = Literal["first order", "random"]
_BESIDE: tuple[Order, ...] = ("random",)


@dataclass(frozen=True, eq=False, repr=False)
class ReplaceableHeads(HasTable):
    """Heads in the order in which they can be replaced, and the measured cost of replacing the first n.

    Attributes:
        order: one row per head, those that cost least first: ``rank`` (from 1), ``layer``, ``head``, ``intervention``
            (the one that replaces it), ``curvature``, ``curvature_se`` (estimated KL(unmodified ‖ replaced) of the
            head alone, nats per token).
        curve: one row per order and number of ``heads``: ``loss``, ``added_loss`` and its standard error ``se``, and
            ``kl``, in nats per predicted token of the held-out texts.
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
            if not any(layer == x and (pd.isna(head) or head == h) for x, h in acting):
                where = f"layer {layer}" if pd.isna(head) else head_label(layer, int(head))
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
        return (
            f"ReplaceableHeads: {self.n} of {len(self.order)} heads within {self.budget:g} nats per token\n"
            f"  measured on held-out texts: {self.n} replaced cost {cost['added_loss']:.3f}{spread}, {most}"
        )


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
    draws: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> ReplaceableHeads:
    """Order heads by the estimated cost of replacing each, and measure the cost of replacing the first n together.

    Each head is replaced by the one of ``interventions`` with the smallest curvature for it (``head_effects``), and
    heads with the smallest curvature come first. The first-order effect is left out of the order: its sign on few texts
    is noise, and the smallest values are those with the most favourable noise. The sum of the curvatures does not
    predict the cost of many heads together, so the cost is measured, on other texts.

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
        draws, seed: as in ``head_effects``; the seed also gives the random order.

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
        >>> model.run_with_hooks(tokens[9:], fwd_hooks=found.hooks(static)).shape
        torch.Size([3, 64, 1024])
    """
    budget = check_number("budget", budget, above=0)
    extra = check_subset("beside", beside, get_args(Order))
    check_seed(seed)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    found = named_interventions(model, interventions, rows_by_layer(reading, among, heads), texts)
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
    orders = {"curvature": _ordered(effects, "curvature")}
    if "first order" in extra:
        orders["first order"] = _ordered(effects, "first")
    if "random" in extra:
        drawn = np.random.default_rng(seed).permutation(len(orders["curvature"]))
        orders["random"] = orders["curvature"].iloc[drawn]
    n_heads = len(orders["curvature"])
    sizes = _counts(counts, n_heads)
    runs: dict[tuple[str, int], tuple[float, float, float, float]] = {}
    with running(model), progress_bar(total=len(orders) * len(sizes), desc="sets", disable=not progress) as bar:
        unmodified = Unmodified.of(run_texts(model, measured), measured)

        def cost(name: str, n: int) -> float:
            """Return the added loss with the first n heads of an order replaced; each set is run once."""
            if (name, n) not in runs:
                hooks = _replacing(items, orders[name].iloc[:n])
                run = unmodified.compare(run_texts(model, measured, [hooks] * len(measured.groups)))
                added, error = unmodified.blocks.mean(run.losses - unmodified.losses)
                runs[name, n] = run.losses.mean().item(), added, error, run.divergences.mean().item()
                bar.total = max(bar.total, len(runs))  # bisection adds sets
                bar.update()
            return runs[name, n][1]

        for name, size in product(orders, sizes):
            cost(name, size)
        n = _within(partial(cost, "curvature"), sizes, budget, search=counts is None)
    curve = pd.DataFrame(
        [(*place, *runs[place]) for name in orders for place in sorted(runs) if place[0] == name],
        columns=["order", "heads", "loss", "added_loss", "se", "kl"],
    )
    order = orders["curvature"].reset_index(drop=True)
    columns = ["layer", "head", "intervention", "curvature", "curvature_se"]
    order = order[columns].assign(rank=range(1, n_heads + 1))[["rank", *columns]]
    return ReplaceableHeads(order, curve, budget, n)


def _refuse_own(interventions: Iterable[Hooks]) -> None:
    """Raise for user hooks, which cannot be restricted to single heads."""
    if own := [hooks for hooks in interventions if hooks.others]:
        raise ArgumentError(
            "interventions", f"must be hooks of this package alone, got functions of your own in {shown(own[0])}"
        )


def _ordered(effects: pd.DataFrame, by: str) -> pd.DataFrame:
    """Keep each head's cheapest intervention, and sort the heads."""
    return effects.sort_values(by, kind="stable").drop_duplicates(["layer", "head"])


def _counts(counts: Any, n_heads: int) -> list[int]:
    if counts is None:
        return sorted({round(n_heads * tenth / 10) for tenth in range(11)})
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Collection) or not len(counts):
        raise ArgumentError("counts", f"must be numbers of heads, got {shown(counts)}")
    return sorted({0, *(check_integer("counts", n, 1, n_heads) for n in counts)})


def _replacing(items: dict[str, NamedIntervention], rows: pd.DataFrame) -> Hooks:
    """Return hooks that replace the heads of these rows."""
    chosen: dict[tuple[str, int], list[int] | None] = {}
    for name, layer, head in zip(rows["intervention"], rows["layer"], rows["head"], strict=True):
        heads = chosen.setdefault((name, layer), None if pd.isna(head) else [])
        if heads is not None:
            heads.append(int(head))
    return joined(items[name].of(layer, heads) for (name, layer), heads in chosen.items())


def _within(cost: Callable[[int], float], sizes: Sequence[int], budget: float, *, search: bool) -> int:
    """Return the largest measured number of heads below the first that exceeds the budget; bisect for it."""
    costs = {size: cost(size) for size in sizes}
    above = next((size for size in sizes if costs[size] > budget), None)
    if above is None:
        return sizes[-1]
    below = max(size for size in sizes if size < above)
    while search and above - below > 1:
        middle = (below + above) // 2
        if cost(middle) > budget:
            above = middle
        else:
            below = middle
    return below
