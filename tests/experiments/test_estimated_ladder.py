"""The ladder of all heads from estimates: divergences by curvature, exact ones as in a loop, verdicts of every head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import zoo

from tl_posdisent import ablate_heads, attention_ladder, head_effects, head_verdicts
from tl_posdisent.experiments import estimated_ladder
from tl_posdisent.experiments.causal.attention_ladder import MEAN
from tl_posdisent.hooks import applied, fitted_attention, substitute_attention

TOKENS = zoo.random_tokens(length=12, batch=7)
FITTED, HELDOUT = TOKENS[:3], TOKENS[3:]
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
pytestmark = pytest.mark.filterwarnings("ignore:a static head's direction")


def interventions(model: Any, **some: Any) -> dict[str, Any]:
    return {
        MEAN: ablate_heads(model, some.pop("heads", None), mode="mean", reference=FITTED, **some),
        "uniform": substitute_attention(model, "uniform", **some),
        "distance": fitted_attention(model, FITTED, "distance", **some),
        "static": fitted_attention(model, FITTED, "static", **some),
    }


def ladder(model: Any, **options: Any) -> Any:
    options = {"rungs": ["distance", "static"], "audit": 0, "progress": False} | options
    return estimated_ladder(model, FITTED, **{"heldout": HELDOUT} | options)


@FEW
def test_estimates_are_those_of_head_effects(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = ladder(model, exact=0, draws=2, seed=3)
    effects = head_effects(model, HELDOUT, interventions(model), draws=2, seed=3, exact=0, progress=False)
    expected = effects.set_index(["layer", "head", "intervention"])
    assert not table["exact"][table["rung"] != "untouched"].any()
    for row in table[table["rung"] != "untouched"].itertuples():
        assert row.kl == pytest.approx(expected.loc[(row.layer, row.head, row.rung), "curvature"], rel=1e-6)
        assert row.error_kl == pytest.approx(expected.loc[(row.layer, row.head, row.rung), "curvature_se"], rel=1e-6)
    assert table.groupby(["layer", "head"]).size().tolist() == [5] * 16
    assert (table["kl"][table["rung"] == "untouched"] == 0).all()


@FEW
def test_exact_rows_are_those_of_a_loop(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = ladder(model, exact=100, negligible=1e-9).set_index(["layer", "head", "rung"])
    assert table["exact"].all()
    with torch.no_grad():
        clean = model(HELDOUT)[:, :-1].log_softmax(-1)
    for layer, head in ((0, 3), (1, 6)):
        found: dict[str, np.ndarray] = {}
        for rung, hooks in interventions(model).items():
            only = [x for x in hooks.interventions if x.spec.layer == layer]
            if rung == MEAN:
                hooks = ablate_heads(model, [(layer, head)], mode="mean", reference=FITTED)
            elif rung == "uniform":
                hooks = substitute_attention(model, "uniform", layers=layer, heads=[head])
            else:
                hooks = fitted_attention(model, FITTED, rung, layers=layer, heads=[head])  # type: ignore[arg-type]
            assert only
            with torch.no_grad(), applied(model, hooks):
                changed = model(HELDOUT)[:, :-1].log_softmax(-1)
            found[rung] = (clean.exp() * (clean - changed)).sum(-1).double().mean(1).numpy()
        for rung, kl in found.items():
            row, n = table.loc[(layer, head, rung)], len(kl)
            assert row["kl"] == pytest.approx(kl.mean(), abs=2e-6)
            assert row["error_kl"] == pytest.approx(kl.std(ddof=1) / n**0.5, abs=2e-6)
            share = 1 - kl.sum() / found["uniform"].sum()
            assert row["recovered_kl"] == pytest.approx(share, abs=2e-4)
            rest = (found["uniform"] - kl) - share * found["uniform"]
            error = (np.square(rest).sum() / (1 - 1 / n)) ** 0.5 / found["uniform"].sum()
            assert row["se_kl"] == pytest.approx(error, abs=2e-4)
        assert found["static"].mean() > 1e-5


@FEW
def test_both_ladders_weigh_unequal_texts_by_their_predicted_tokens(kind: str, name: str, shared_model: Any) -> None:
    model, lengths = shared_model(kind, name), torch.tensor([12, 4, 9, 3])
    mask = (torch.arange(12) < lengths[:, None]).long()
    texts: dict[str, Any] = {"heldout": HELDOUT * mask, "heldout_mask": mask, "heads": [(0, 3), (1, 6)]}
    estimated = ladder(model, exact=100, negligible=1e-9, **texts).set_index(["layer", "head", "rung"])
    rungs: Any = ["distance", "static"]
    exact = attention_ladder(model, FITTED, rungs=rungs, controls=[], progress=False, **texts)
    exact = exact.set_index(["layer", "head", "rung"])
    for place in estimated.index:
        for column in ("kl", "recovered_kl"):
            assert estimated.loc[place, column] == pytest.approx(exact.loc[place, column], abs=2e-5)
    by_token = []
    for text, length in zip(HELDOUT, lengths.tolist(), strict=True):
        alone = text[None, :length]
        with torch.no_grad():
            p = model(alone)[0, :-1].double().log_softmax(-1)
            with applied(model, substitute_attention(model, "uniform", heads=[(0, 3)])):
                q = model(alone)[0, :-1].double().log_softmax(-1)
        by_token.append((p.exp() * (p - q)).sum(-1))
    assert estimated.loc[(0, 3, "uniform"), "kl"] == pytest.approx(torch.cat(by_token).mean().item(), abs=2e-6)


@FEW
def test_the_used_heads_of_the_largest_divergence_are_run(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    estimates = ladder(model, exact=0, negligible=1e-3)
    means = estimates[estimates["rung"] == MEAN].set_index(["layer", "head"])["kl"]
    negligible = float(means.quantile(0.4))  # so that some heads are surely not used
    verdicts = head_verdicts(estimates, negligible=negligible).set_index(["layer", "head"])
    used = [place for place in means.sort_values(ascending=False).index if verdicts.loc[place, "verdict"] != "not used"]
    table = ladder(model, exact=5, negligible=negligible)
    run = table.groupby(["layer", "head"])["exact"].all()
    assert set(run[run].index) == set(used[:5])
    assert len(head_verdicts(table, negligible=negligible)) == 16


@FEW
def test_heads_are_run_until_their_verdict_is_decided(kind: str, name: str, shared_model: Any) -> None:
    """At each look the oracle is one table of exact runs on the texts read so far."""
    model, columns = shared_model(kind, name), ["kl", "error_kl", "recovered_kl", "se_kl", "blocks", "df", "tokens"]
    heldout = zoo.random_tokens(length=12, batch=8, seed=5)
    all_runs = {n: ladder(model, heldout=heldout[:n], exact=None, negligible=1e-9) for n in (4, 8)}
    means = all_runs[8][all_runs[8]["rung"] == MEAN]["kl"]
    options = {"negligible": float(means.quantile(0.3)), "share": 0.6}
    alone = {n: head_verdicts(table, **options, confidence=1 - 0.05 / 2) for n, table in all_runs.items()}
    table = ladder(model, heldout=heldout, exact=None, looks=2, **options)
    run = table[table["exact"]].groupby(["layer", "head"]).filter(lambda some: len(some) == 5)
    verdicts, stopped = head_verdicts(table, **options).set_index(["layer", "head"]), []
    for (layer, head), rows in run.groupby(["layer", "head"]):
        sure = {n: x[(x["layer"] == layer) & (x["head"] == head)].iloc[0] for n, x in alone.items()}
        end = next((n for n, x in sure.items() if x["simplest"] == x["at_most"]), 8)
        of = all_runs[end][(all_runs[end]["layer"] == layer) & (all_runs[end]["head"] == head)]
        assert rows[columns].to_numpy() == pytest.approx(of[columns].to_numpy(), rel=1e-5, abs=1e-9)
        assert verdicts.loc[(layer, head), "verdict"] == sure[end]["verdict"]
        stopped.append(end)
    assert 8 in stopped
    assert 4 in stopped or name == "gptj"  # of which no verdict is decided by four texts
    assert (table["tokens"] == 11 * table["blocks"]).all()


def test_random_heads_that_were_estimated_as_not_used_are_run(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    estimates = ladder(model, exact=0)
    negligible = float(estimates[estimates["rung"] == MEAN]["kl"].quantile(0.6))
    unused = head_verdicts(estimates, negligible=negligible)["verdict"] == "not used"
    assert unused.sum() > 4
    table = ladder(model, exact=0, audit=4, negligible=negligible)
    whole = table[table["exact"]].groupby(["layer", "head"]).filter(lambda some: len(some) == 5)
    drawn = whole.set_index(["layer", "head"]).index.unique()
    exact = ladder(model, exact=None, negligible=1e-9).set_index(["layer", "head", "rung"])["kl"]
    assert len(drawn) == 4
    assert all(unused[8 * layer + head] for layer, head in drawn)
    assert whole.set_index(["layer", "head", "rung"])["kl"].to_dict() == pytest.approx(
        exact[[place in drawn for place in exact.index.droplevel("rung")]].to_dict()
    )
    above = sum(exact[(*place, MEAN)] > negligible for place in drawn)
    assert table.attrs["audit"]["audited"] == 4
    assert table.attrs["audit"]["above"] == above
    assert ladder(model, exact=0, audit=4, negligible=negligible, seed=0)["exact"].equals(table["exact"])


@pytest.mark.usefixtures("unchecked")
def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"heldout": HELDOUT[:1]}, "heldout must be at least two texts at each look, .* 2 or more for looks=1, got 1"),
        ({"rungs": ["banded"]}, "rungs must be"),
        ({"exact": -1}, "exact must be"),
        ({"share": 1.5}, "share must be"),
        ({"looks": 3}, "heldout must be at least two texts at each look, .* 8 or more for looks=3, got 4"),
        ({"looks": 0}, "looks must be"),
        ({"audit": -1}, "audit must be"),
        ({"heldout": zoo.random_tokens(length=20, batch=2)}, "interventions must act on each text alone .*distance"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            ladder(model, **options)
