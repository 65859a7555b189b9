"""The ladder with few heads run: estimates of the others are curvatures, runs those of the whole ladder."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo

from tl_posdisent import ablate_heads, attention_ladder, head_effects, head_verdicts
from tl_posdisent.experiments.causal.ladder_runs import MEAN
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
    options = {"rungs": ["distance", "static"], "controls": [], "progress": False} | options
    return attention_ladder(model, FITTED, **{"heldout": HELDOUT} | options)


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
    untouched = table[table["rung"] == "untouched"][["kl", "error_kl", "recovered_kl", "se_kl"]]
    assert (untouched == torch.tensor([0.0, 0.0, 1.0, 0.0]).numpy()).all(axis=None)


@FEW
def test_runs_are_those_of_the_whole_ladder(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    whole, few = ladder(model), ladder(model, exact=5, draws=2)
    assert whole["exact"].all()
    run = few[few["exact"]]
    assert run.groupby(["layer", "head"]).ngroups == few.attrs["search"]["run"] == 5
    same = whole.merge(run[["layer", "head"]].drop_duplicates(), on=["layer", "head"])
    pd.testing.assert_frame_equal(run.reset_index(drop=True), same, check_dtype=False, rtol=1e-4, atol=2e-6)
    assert len(few) == len(whole)
    rest = few[~few["exact"]]
    assert rest[["loss", "recovered", "recovered_mean", "error"]].isna().all(axis=None)
    columns = ["layer", "head", "rung", "parameters", "causal"]
    both = rest[columns].merge(whole[columns], on=["layer", "head", "rung"])
    known = both["rung"] != "untouched"
    assert both["parameters_x"][known].tolist() == both["parameters_y"][known].tolist()
    assert (both["causal_x"] == both["causal_y"]).all()
    assert len(head_verdicts(few)) == 16


@FEW
def test_unequal_texts_weigh_by_their_predicted_tokens(kind: str, name: str, shared_model: Any) -> None:
    model, lengths = shared_model(kind, name), torch.tensor([12, 4, 9, 3])
    mask = (torch.arange(12) < lengths[:, None]).long()
    texts: dict[str, Any] = {"heldout": HELDOUT * mask, "heldout_mask": mask, "heads": [(0, 3), (1, 6)]}
    uniform = ladder(model, **texts).set_index(["layer", "head", "rung"]).loc[(0, 3, "uniform"), "kl"]
    estimate = ladder(model, exact=0, **texts).set_index(["layer", "head", "rung"]).loc[(0, 3, "uniform"), "kl"]
    alone = [text[None, :length] for text, length in zip(HELDOUT, lengths.tolist(), strict=True)]
    by_token = []
    hooks = substitute_attention(model, "uniform", heads=[(0, 3)])
    for text in alone:
        with torch.no_grad():
            p = model(text)[0, :-1].double().log_softmax(-1)
            with applied(model, hooks):
                q = model(text)[0, :-1].double().log_softmax(-1)
        by_token.append((p.exp() * (p - q)).sum(-1))
    assert uniform == pytest.approx(torch.cat(by_token).mean().item(), abs=2e-6)
    options: Any = {"heads": [(0, 3)], "exact": 0, "attention_mask": mask, "progress": False}
    effects = head_effects(model, HELDOUT * mask, {"uniform": hooks}, **options)
    assert estimate == pytest.approx(effects["curvature"].item(), rel=1e-6)


def test_rungs_that_are_fitted_to_the_predicted_text_are_only_run(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    table = ladder(model, exact=2, rungs=["distance", "banded"], layers=1, controls=["shuffled", "random"])
    rungs = table[table["control"] == "none"].groupby("exact")["rung"].unique().map(set)
    assert rungs[True] - rungs[False] == {"banded"}
    assert set(table["control"][~table["exact"]]) == {"none"}
    places = table[table["exact"]].groupby("control")[["layer", "head"]].apply(lambda x: set(map(tuple, x.to_numpy())))
    assert places["none"] == places["shuffled"] == places["random"]
    assert len(places["none"]) == 2


@pytest.mark.usefixtures("unchecked")
def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"exact": -1}, "exact must be"),
        ({"exact": "few"}, r"exact must be an integer of at least 0 \(a number of heads, or 'all'\), got 'few'"),
        ({"exact": 2, "draws": 0}, "draws must be"),
        ({"exact": 2, "unit": "layer"}, "exact must be 'all' with unit='layer'"),
        ({"exact": 2, "metric": lambda logits: logits.mean()}, "exact must be 'all' with a metric"),
        ({"exact": 2, "heldout": zoo.random_tokens(length=20, batch=2)}, "heldout must be no longer than the texts"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            ladder(model, **options)
