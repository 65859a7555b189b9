"""Attribution of the loss to the additive components of scores: Shapley values."""

from __future__ import annotations

from itertools import combinations
from math import factorial
from typing import Literal, get_args

import pandas as pd

from tl_posdisent.hooks.score_components import ScorePart
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice

_COMPONENTS: tuple[ScorePart, ...] = get_args(ScorePart)
Measured = Literal["loss", "kl"]


def shapley_values(table: pd.DataFrame, measured: Measured = "loss") -> pd.DataFrame:
    """Attribute the loss to the four components of the scores: exact Shapley values from ``additive_substitution``.

    With ``v(S)`` the loss with a subset ``S`` of distance, query, key and residual kept in all layers, the Shapley
    value of a component is the change of the loss when it is added, averaged over all orders::

        value(p) = Σ_S |S|! (3 - |S|)! / 4! · (v(S ∪ {p}) - v(S)),    S without p

    The four add up to ``v(all) - v(none)``: the loss of the unmodified model minus that of uniform attention.

    Args:
        table: table of ``additive_substitution``, for either additive model.
        measured: ``"loss"``, or ``"kl"``, the divergence of the predictions.

    Returns:
        One row per component: ``component``; ``value``, nats per token, negative if it lowers the loss; ``first`` and
        ``last``, the change if it is added to none and to all of the others.

    Raises:
        ValueError: a table without exactly one row for each subset; an unknown ``measured``.

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
        raise ArgumentError("table", f"must be a table of additive_substitution, got {got}")
    runs = table[(table["scope"] == "all") & (table["put_in"] == "fit")]
    kept = [frozenset() if keep == "mean" else frozenset(str(keep).split("+")) for keep in runs["keep"]]
    wanted = {frozenset(some) for n in range(len(_COMPONENTS) + 1) for some in combinations(_COMPONENTS, n)}
    if set(kept) != wanted or len(kept) != len(wanted):
        raise ArgumentError(
            "table",
            f'must have one row for each of the {len(wanted)} subsets of components (scope "all", put_in "fit"), '
            f"got {len(kept)} rows for {len(set(kept) & wanted)} of them",
        )
    values = dict(zip(kept, map(float, runs[measured]), strict=True))
    rows = []
    for component in _COMPONENTS:
        gains = {some: values[some | {component}] - values[some] for some in wanted if component not in some}
        value = sum(gain * factorial(len(some)) * factorial(3 - len(some)) for some, gain in gains.items()) / 24
        others = frozenset(_COMPONENTS) - {component}
        rows.append((component, value, gains[frozenset()], gains[others]))
    return pd.DataFrame(rows, columns=["component", "value", "first", "last"])
