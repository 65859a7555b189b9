"""The ladder of additive attention: every row is the run that it says; verdicts follow from the table."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L, logits
from support.untouched import state
from torch import Tensor

from tl_posdisent import (
    attention_ladder,
    demo_tokens,
    head_verdicts,
    load_demo_model,
    logit_difference,
    random_control,
)
from tl_posdisent.additive.attention.rungs import RUNGS
from tl_posdisent.hooks import fit_attention_layers, substitute_attention

pytestmark = pytest.mark.usefixtures("unchecked")
TRAIN = zoo.random_tokens(L + 2)
BANDS = (1, 3)
FEW = ("distance", "static", "additive")


def ladder(model: Any, **options: Any) -> pd.DataFrame:
    return attention_ladder(model, TRAIN, **{"heldout": TOKENS, "bands": BANDS, "progress": False, **options})


def figures(model: Any, hooks: list[Any], tokens: Tensor = TOKENS) -> tuple[float, float, float]:
    """Loss, divergence from the untouched model, standard error of the change of loss: by other means."""
    clean, changed = logits(model, [], tokens).double(), logits(model, hooks, tokens).double()
    loss, plain = (
        torch.nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        for x in (changed, clean)
    )
    p, q = (torch.distributions.Categorical(logits=x) for x in (clean, changed))
    kl = torch.distributions.kl_divergence(p, q).mean().item()
    return loss.mean().item(), kl, ((loss - plain).var() / len(loss)).sqrt().item()


def same(row: Any, expected: tuple[float, float, float]) -> None:
    assert (row.loss, row.kl, row.error) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_every_row_is_the_run_that_it_says(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = state(model)
    rows = ladder(model, layers=[0, 1], heads=[(0, 3), (1, 0), (1, 6)], rungs=FEW, controls=[])
    assert state(model) == before
    assert rows["rung"].tolist() == ["uniform", *FEW, "untouched"] * 3
    fits = {rung: fit_attention_layers(model, TRAIN, rung, replaced=False) for rung in FEW[:2]}
    for row in rows.itertuples():
        where = [(row.layer, row.head)]
        by = {row.layer: fits[row.rung][row.layer]} if row.rung in fits else row.rung
        same(row, figures(model, substitute_attention(model, by, heads=where)))
        ends = rows[(rows["layer"] == row.layer) & (rows["head"] == row.head)].set_index("rung")
        gap = ends["loss"]["uniform"] - ends["loss"]["untouched"]
        share = (ends["loss"]["uniform"] - row.loss) / gap if abs(gap) > ends["error"]["uniform"] else torch.nan
        assert row.recovered == pytest.approx(share, nan_ok=True)
        assert row.causal == (row.rung != "additive")
    assert rows.groupby("rung")["parameters"].first().to_dict() == {
        "uniform": 0,
        "distance": L + 2,
        "static": L + 2 + 1 + 8,
        "additive": 2 * 2 * L,
        "untouched": 0,
    }
    assert rows[rows["rung"] == "untouched"][["kl", "error"]].abs().max().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["layer", "all"])
def test_layers_and_the_whole_model(unit: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    rows = ladder(model, unit=unit, rungs=[*FEW, "banded"], controls=[])
    assert len(rows) == 6 * (2 if unit == "layer" else 1)
    assert rows["head"].isna().all()
    assert rows["layer"].isna().all() == (unit == "all")
    fits = {rung: fit_attention_layers(model, TRAIN, rung, replaced=unit == "all") for rung in FEW[:2]}
    for row in rows.itertuples():
        layers = [0, 1] if unit == "all" else [int(row.layer)]
        by = {layer: fits[row.rung][layer] for layer in layers} if row.rung in fits else row.rung
        same(row, figures(model, substitute_attention(model, by, layers=layers, bands=BANDS)))
        size = {"static": 8 * (L + 2 + 1 + 8), "banded": 8 * 2 * (L + L + (L - 1) + (L - 3))}.get(row.rung)
        assert size is None or row.parameters == size * len(layers)


@pytest.mark.slow
def test_the_controls(shared_model: Any) -> None:
    """Of three tokens there are two orders with the first in place; all alike, a text is its own shuffle."""
    model = shared_model("bridge", "llama-gqa")
    options = {"heads": [(0, 3)], "rungs": ["static", "additive"], "progress": False}
    alike = attention_ladder(model, torch.full((1, 10), 7), **options)
    kinds = alike.groupby(["rung", "control"])["loss"].first().unstack()
    assert kinds["shuffled"].isna().sum() == 2
    assert (kinds["none"] - kinds["shuffled"]).abs().max() < 1e-6
    table = attention_ladder(model, TOKENS, **options, controls=["random", "shuffled"], seed=5)
    assert table["control"].tolist() == ["none"] * 4 + ["shuffled"] * 2 + ["random"] * 4
    fitted = table.pivot_table(index="rung", columns="control", values="loss")
    assert (fitted["none"] - fitted["shuffled"]).abs().loc[["static", "additive"]].min() > 1e-4
    chance = next(random_control(model, [5]))
    for row in table[table["control"] == "random"].itertuples():
        if row.rung == "additive":
            same(row, figures(chance, substitute_attention(chance, "additive", heads=[(0, 3)])))
    demo = attention_ladder(load_demo_model(), demo_tokens(length=64), layers=3, unit="layer", rungs=["distance"])
    loss = demo.set_index(["control", "rung"])["loss"]
    gap = loss["none", "uniform"] - loss["none", "untouched"]
    assert gap > demo["error"].max()
    assert demo["recovered"].iloc[-1] == pytest.approx((loss["none", "uniform"] - loss["shuffled", "distance"]) / gap)
    assert not table[table["rung"] == "static"]["causal"].any()  # without held-out texts
    pd.testing.assert_frame_equal(
        table, attention_ladder(model, TOKENS, **options, controls=["random", "shuffled"], seed=5)
    )


def test_a_padded_batch_is_its_texts(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones(2, L, dtype=torch.long)
    mask[0, :4] = 0
    options = {"heads": [(1, 6)], "rungs": ["static", "banded"], "controls": []}
    together = ladder(model, heldout_mask=mask, **options)
    alone = [ladder(model, heldout=x, **options) for x in (TOKENS[:1, 4:], TOKENS[1:])]
    n = torch.tensor([L - 5, L - 1])
    for column, weights in (("loss", n), ("kl", n + 1)):
        expected = sum(x[column] * w.item() for x, w in zip(alone, weights, strict=True)) / weights.sum().item()
        assert (together[column] - expected).abs().max() < 1e-4
    both = ladder(model, heldout=None, attention_mask=torch.ones(2, L + 2, dtype=torch.long), **options)
    assert len(both) == 4


# --- verdicts -------------------------------------------------------------------------------------------------


def made(recovered: dict[str, float], gap: float = 1.0, error: float = 0.01, head: int = 0) -> pd.DataFrame:
    shares = {"uniform": 0.0, **recovered, "untouched": 1.0}
    rows = [(1, head, "none", x, 3 - gap * (y + 1e-9), y, 0.1, error, 5, True) for x, y in shares.items()]
    names = ["layer", "head", "control", "rung", "loss", "recovered", "kl", "error", "parameters", "causal"]
    return pd.DataFrame(rows, columns=names)


def test_the_verdict_is_the_lowest_rung_that_suffices() -> None:
    low = dict.fromkeys(RUNGS[1:-1], 0.2)
    for n, verdict in enumerate(["positional"] * 2 + ["static"] * 2 + ["banded", "query-dependent"], start=1):
        reached = {rung: 0.96 if i >= n - 1 else 0.2 for i, rung in enumerate(low)}
        row = head_verdicts(made(reached)).iloc[0]
        assert (row["verdict"], row["rung"], row["recovered"]) == (verdict, RUNGS[n], 0.96)
        assert head_verdicts(made(reached), share=0.97)["rung"].tolist() == ["untouched"]
    assert head_verdicts(made(low))["verdict"].tolist() == ["query-dependent"]
    for tried, verdict in (
        ({}, "undecided"),
        ({"distance": 0.2}, "not positional"),
        ({"distance": 0.2, "static": 0.9}, "not static"),
        ({"banded": 0.9}, "query-dependent"),
    ):
        assert head_verdicts(made(tried))["verdict"].tolist() == [verdict]
    shuffled = made({"distance": 1.0}).assign(control="shuffled")
    assert head_verdicts(pd.concat([made(low), shuffled]))["rung"].tolist() == ["untouched"]


def test_a_gap_within_noise_is_no_effect() -> None:
    small, negative = made({"distance": 1.0}, gap=0.1, error=0.06), made({"distance": 1.0}, gap=-1.0, head=1)
    verdicts = head_verdicts(pd.concat([small, negative]))
    assert verdicts[["verdict", "rung"]].to_numpy().tolist() == [["no effect", "uniform"]] * 2
    assert verdicts["gap"].tolist() == pytest.approx([0.1, -1.0])
    assert head_verdicts(small, noise=1)["verdict"].tolist() == ["positional"]
    assert head_verdicts(small, noise=1)["error"].tolist() == [0.06]


def test_verdicts_of_a_run(shared_model: Any) -> None:
    table = ladder(shared_model("bridge", "llama-gqa"), layers=1, rungs=["distance"], heads=[2, 5])
    verdicts = head_verdicts(table, share=1e-9, noise=0)
    assert verdicts[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 5]]
    for row in verdicts.itertuples():
        gap = table[(table["head"] == row.head) & (table["control"] == "none")].set_index("rung")["loss"]
        assert row.gap == pytest.approx(gap["uniform"] - gap["untouched"])
    assert len(head_verdicts(ladder(shared_model("bridge", "llama-gqa"), unit="all", rungs=["distance"]))) == 1


# --- refusals -------------------------------------------------------------------------------------------------


def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = state(model)
    for options, words in (
        ({"rungs": ["static", "static"]}, "rungs must be some of uniform, .* each once"),
        (
            {"heldout": zoo.random_tokens(L + 3)},
            f"heldout must be no longer than the texts of tokens, {L + 2}, got {L + 3}",
        ),
        ({"heldout": None, "heldout_mask": torch.ones(2, L)}, "heldout_mask must be None without heldout"),
    ):
        with pytest.raises(ValueError, match=words):
            ladder(model, **options)
    longer = {"heldout": zoo.random_tokens(L + 3), "rungs": ["additive"], "unit": "all", "controls": []}
    assert len(ladder(model, **longer)) == 3
    assert state(model) == before
    with pytest.raises(ValueError, match="share must be"):
        head_verdicts(made({}), share=1.1)
    for table in (None, made({}).drop(columns="error"), made({})[:1], pd.concat([made({}), made({})])):
        with pytest.raises(ValueError, match="table must"):
            head_verdicts(table)


@pytest.mark.slow
def test_a_metric_of_prompts_of_several_lengths(shared_model: Any) -> None:
    """Its value is that of each prompt run alone; verdicts take gaps of either sign."""
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones_like(TOKENS)
    mask[1, L - 3 :] = 0
    metric = logit_difference(answers=[3, 4], wrong=[5, 6])
    options: dict[str, Any] = {"layers": [1], "heads": [0, 3], "rungs": FEW, "controls": []}
    rows = ladder(model, heldout_mask=mask, metric=metric, **options)
    fits = {rung: fit_attention_layers(model, TRAIN, rung, replaced=False) for rung in FEW[:2]}
    for (_, head), some in rows.groupby(["layer", "head"]):
        values = {}
        for row in some.itertuples():
            by = {1: fits[row.rung][1]} if row.rung in fits else row.rung
            hooks = substitute_attention(model, by, heads=[(1, int(head))])
            last = [logits(model, hooks, x)[0, -1].double() for x in (TOKENS[:1], TOKENS[1:, : L - 3])]
            values[row.rung] = torch.stack([last[0][3] - last[0][5], last[1][4] - last[1][6]])
            assert row.value == pytest.approx(values[row.rung].mean().item(), abs=1e-5)
        gap, noise = (values["uniform"] - values["untouched"]).mean(), some["error"].iloc[0]
        for row in some.itertuples():
            change = values[row.rung] - values["untouched"]
            assert row.error == pytest.approx((change.std() / 2**0.5).item(), abs=1e-5)
            share = ((values["uniform"] - values[row.rung]).mean() / gap).item() if gap.abs() > noise else torch.nan
            assert row.recovered == pytest.approx(share, abs=1e-3, nan_ok=True)
    found = head_verdicts(rows, noise=0)
    assert (found["verdict"] != "no effect").all()
    flipped = head_verdicts(rows.assign(value=-rows["value"]), noise=0)
    assert flipped["rung"].tolist() == found["rung"].tolist()
    assert flipped["gap"].tolist() == (-found["gap"]).tolist()
    plain = ladder(model, heldout_mask=mask, **options)
    pd.testing.assert_series_equal(plain["loss"], rows["loss"])
    assert "value" not in plain
    one = ladder(model, heldout=TOKENS[:1], metric=lambda logits, tokens: logits[0, -1, 7], **options)
    assert one["error"].isna().all()
    assert one["recovered"].notna().all()
    assert (head_verdicts(one)["verdict"] != "no effect").all()
