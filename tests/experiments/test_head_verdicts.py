"""Verdicts follow from the table of the ladder, and are as sure as they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L

from tl_posdisent import attention_ladder, head_verdicts
from tl_posdisent.additive.attention.rungs import RUNGS
from tl_posdisent.utils.statistics import Blocks

pytestmark = pytest.mark.usefixtures("unchecked")


def ladder(model: Any, **options: Any) -> pd.DataFrame:
    return attention_ladder(model, zoo.random_tokens(L + 2), **{"heldout": TOKENS, "progress": False, **options})


def made(recovered: dict[str, float], gap: float = 1.0, error: float = 0.01, head: int = 0) -> pd.DataFrame:
    shares = {"uniform": 0.0, **recovered, "untouched": 1.0}
    rows = [(1, head, "none", x, 3 - gap * (y + 1e-9), y, 0.004, 0.1, error, 10, 5, True) for x, y in shares.items()]
    names = ["layer", "head", "control", "rung", "loss", "recovered", "se", "kl", "error", "blocks", "parameters"]
    return pd.DataFrame(rows, columns=[*names, "causal"])


def said(table: pd.DataFrame, **options: Any) -> list[str]:
    return head_verdicts(table, **options)[["verdict", "simplest", "at_most"]].iloc[0].tolist()


def test_the_verdict_is_the_simplest_rung_that_suffices() -> None:
    low = dict.fromkeys(RUNGS[1:-1], 0.2)
    kinds = ["first token", "distance", "distance", "static", "additive", "banded", "query-dependent"]
    for n, (rung, verdict) in enumerate(zip(low, kinds, strict=True)):
        reached = {x: 0.96 if i >= n else 0.2 for i, x in enumerate(low)}
        assert said(made(reached)) == [verdict, rung, rung]
        assert said(made(reached), share=0.97) == ["query-dependent", "untouched", "untouched"]
        between = verdict if verdict == kinds[-1] else f"undecided between {verdict} and query-dependent"
        assert said(made(reached), share=0.965) == [between, rung, "untouched"]
        assert said(made(reached), share=0.965, confidence=0)[1:] == ["untouched", "untouched"]
    near = {"distance": 0.949, "distance+sink": 0.945, "static": 0.99}
    assert said(made(near)) == ["undecided between distance and static", "distance", "static"]
    for tried, verdict in (
        ({}, "undecided"),
        ({"distance": 0.2}, "more than distance"),
        ({"distance": 0.2, "static": 0.949}, "undecided between static and more than static"),
        ({"banded": 0.9}, "query-dependent"),
    ):
        assert said(made(tried))[0] == verdict
    shuffled = made({"distance": 1.0}).assign(control="shuffled")
    assert said(pd.concat([made(low), shuffled]))[1] == "untouched"
    unknown = made(low).assign(se=float("nan"), error=float("nan"))  # a metric of one text
    assert said(unknown)[0] == "undecided between first token and query-dependent"


def test_a_gap_within_noise_is_no_effect() -> None:
    small, negative = made({"distance": 1.0}, gap=0.1, error=0.05), made({"distance": 1.0}, gap=-1.0, head=1)
    verdicts = head_verdicts(pd.concat([small, negative]))
    assert verdicts[["verdict", "simplest"]].to_numpy().tolist() == [["no effect", "uniform"]] * 2
    assert verdicts["gap"].tolist() == pytest.approx([0.1, -1.0])
    assert said(small, confidence=0.9)[0] == "distance"  # Student's t with 9 degrees: 1.83, and 2.26 at 0.95
    assert head_verdicts(small)["error"].tolist() == [0.05]


def test_a_head_whose_mean_output_costs_nothing_is_not_used() -> None:
    """Whatever uniform attention does to it; and a head that is used has the verdict that it would have without."""
    table = made({"distance": 0.2, "static": 1.0})
    uniform, untouched = (table[table["rung"] == x] for x in ("uniform", "untouched"))
    for worth, error, verdict in ((0.1, 0.01, "static"), (0.02, 0.01, "not used"), (-0.5, 0.01, "not used")):
        mean = uniform.assign(rung="mean_output", loss=untouched["loss"].item() + worth, error=error)
        found = head_verdicts(pd.concat([table, mean])).iloc[0]
        assert found["verdict"] == verdict
        assert found["gap_mean"] == pytest.approx(worth)
        assert found["error_mean"] == error
        assert found["gap"] == pytest.approx(1.0)
        if verdict == "not used":
            assert found[["simplest", "at_most"]].tolist() == ["mean_output"] * 2
    assert np.isnan(head_verdicts(table)["gap_mean"].item())


@pytest.mark.parametrize("lengths", [[60], [60] * 3, [60] * 12, [400, *[13] * 9], [300, 120, 60, 20, 8, 4, 2]])
def test_verdicts_are_as_sure_as_they_say(lengths: list[int]) -> None:
    """Tokens with heavy tails; one rung recovers just the share, which the simpler one misses: 300 heads."""
    random, n = np.random.default_rng(0), 300
    blocks = Blocks.of_texts(lengths)
    for missed, least in ((0.9499, 0), (0.5, 80)):
        noise = torch.from_numpy(random.standard_t(4, (2, n, sum(lengths))))
        effects = 0.5 + noise[0]
        tables = []
        for rung, share in (("uniform", 0.0), ("distance", missed), ("static", 0.95), ("untouched", 1.0)):
            off = 0.1 * noise[1] if rung in ("distance", "static") else torch.zeros_like(effects)
            found = [blocks.ratio(share * x + y, x) for x, y in zip(effects, off, strict=True)]
            table = pd.DataFrame(found, columns=["recovered", "se"]).assign(rung=rung, head=range(n))
            table["loss"] = 3 - (share * effects + off).mean(1).numpy()
            tables.append(table)
        errors = [blocks.mean(x)[1] for x in effects]
        table = pd.concat(tables).assign(layer=0, control="none", blocks=blocks.count, df=blocks.df, causal=True)
        table["error"] = np.tile(errors, 4)
        verdicts = head_verdicts(table).query("verdict != 'no effect'")
        right = (verdicts["simplest"] != "untouched") & (verdicts["at_most"] != "distance")
        assert len(verdicts) > 200
        assert right.mean() > 0.95 - 3 * (0.05 * 0.95 / len(verdicts)) ** 0.5
        assert (verdicts["simplest"] == "static").sum() >= least
        guessed = head_verdicts(table, confidence=0).query("verdict != 'no effect'")
        assert (guessed["verdict"] == "static").mean() < 0.7


def test_degrees_of_freedom_decide(shared_model: Any) -> None:
    """A share just outside the t-interval of nine degrees is inside that of two; tables without ``df`` have equal
    blocks."""
    near = made({"distance": 0.95 + 2.3 * 0.004})
    assert said(near)[0] == said(near.assign(df=9.0))[0] == said(near.assign(df=np.nan))[0] == "distance"
    assert said(near.assign(df=2.0))[0] == "undecided between distance and more than distance"
    unequal = torch.ones(2, L, dtype=torch.long)
    unequal[0, 3:] = 0
    for mask in (None, unequal):
        rows = ladder(shared_model("bridge", "llama-gqa"), heldout_mask=mask, heads=[(0, 0)], rungs=[], controls=[])
        blocks = Blocks.of_texts([L - 1, L - 1] if mask is None else [2, L - 1])
        assert rows[["blocks", "df"]].to_numpy().tolist() == [[blocks.count, blocks.df]] * 3
        assert (blocks.df < blocks.count - 1) or mask is None


def test_verdicts_of_a_run(shared_model: Any) -> None:
    table = ladder(shared_model("bridge", "llama-gqa"), layers=1, rungs=["distance"], heads=[2, 5])
    verdicts = head_verdicts(table, share=1e-9, confidence=0)
    assert verdicts[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 5]]
    for row in verdicts.itertuples():
        gap = table[(table["head"] == row.head) & (table["control"] == "none")].set_index("rung")["loss"]
        assert row.gap == pytest.approx(gap["uniform"] - gap["untouched"])
    assert len(head_verdicts(ladder(shared_model("bridge", "llama-gqa"), unit="all", rungs=["distance"]))) == 1


def test_refusals() -> None:
    for option, value in (("share", 1.1), ("confidence", 1.0)):
        with pytest.raises(ValueError, match=f"{option} must be"):
            head_verdicts(made({}), **{option: value})
    for table in (None, made({}).drop(columns="error"), made({})[:1], pd.concat([made({}), made({})])):
        with pytest.raises(ValueError, match="table must"):
            head_verdicts(table)
