"""The deposit: entropies by hand, what must not matter, drops against a plain loop, and a study that keeps its work."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tl_posdisent import ablate_heads
from tl_posdisent.synthetic import (
    Preset,
    SyntheticConfig,
    SyntheticModel,
    TriggerCount,
    deposit,
    deposit_spread,
    deposit_study,
    evaluate,
    head_drops,
    load_checkpoint,
    preset,
    sufficient_heads,
)
from tl_posdisent.synthetic.analysis import deposit_study as study_module

MEASURES = ["drop", "second", "share", "effective_heads"]


def table(drops: list[list[float]], baseline: float = 0.9) -> pd.DataFrame:
    """As ``head_ablation`` gives it; one list per layer."""
    rows = [(n, h, baseline, baseline - x, -x) for n, layer in enumerate(drops) for h, x in enumerate(layer)]
    return pd.DataFrame(rows, columns=["layer", "head", "baseline", "value", "effect"])


def measures(drops: pd.DataFrame, **options: Any) -> list[float]:
    report = deposit(drops, **options)
    return [getattr(report, name) for name in MEASURES]


# --- by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ([[0.0, 0.0], [0.6, 0.0]], [0.6, 0.0, 1.0, 1.0]),
        ([[0.2, 0.2], [0.2, 0.2]], [0.2, 0.2, 0.25, 4.0]),
        ([[0.2, 0.2], [0.0, 0.0]], [0.2, 0.2, 0.5, 2.0]),
        ([[0.4, 0.2], [0.2, -0.5]], [0.4, 0.2, 0.5, 2**1.5]),  # ½ ln 2 + 2 · ¼ ln 4 = 1½ ln 2; a gain is no drop
    ],
)
def test_by_hand(drops: list[list[float]], expected: list[float]) -> None:
    assert measures(table(drops)) == pytest.approx(expected)


def test_where_it_is() -> None:
    report = deposit(table([[0.0, 0.1], [0.1, 0.6]]))
    assert (report.layer, report.head, report.baseline) == (1, 1, 0.9)
    layers = report.by_layer().round(9)
    assert layers.to_dict("list") == {
        "layer": [0, 1],
        "drop": [0.1, 0.6],
        "head": [1, 1],
        "total": [0.1, 0.7],
        "share": [0.125, 0.875],
    }
    assert report.to_frame().loc[0, ["layer", "head", "drop"]].tolist() == [1, 1, 0.6]
    assert "layer 1, head 1" in repr(report)


def test_layers_that_help_nobody_have_no_share() -> None:
    layers = deposit(table([[0.3, -0.1], [-0.2, -0.4]])).by_layer()
    assert layers["total"].tolist() == pytest.approx([0.3, 0.0])
    assert layers["drop"].tolist() == pytest.approx([0.3, 0.0])
    assert layers["share"].tolist() == pytest.approx([1.0, 0.0])


def test_no_head_costs_anything() -> None:
    report = deposit(table([[0.0, -0.1]]))
    assert (report.drop, report.second, report.layer, report.head) == (0.0, 0.0, None, None)
    assert math.isnan(report.share)
    assert math.isnan(report.effective_heads)
    assert report.to_frame()[["layer", "head"]].isna().all(axis=None)
    assert report.by_layer()["share"].isna().all()
    assert "no head costs anything" in repr(report)


def test_one_head() -> None:
    report = deposit(table([[0.5]]))
    assert (report.drop, report.share, report.effective_heads) == (0.5, 1.0, 1.0)
    assert math.isnan(report.second)


# --- laws -------------------------------------------------------------------------------------------------------


def random_table(seed: int, layers: int = 3, heads: int = 5) -> pd.DataFrame:
    draws = np.random.default_rng(seed).normal(0.1, 0.2, (layers, heads))
    return table(draws.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_names_of_heads_and_order_of_rows_do_not_matter(seed: int) -> None:
    drops = random_table(seed)
    shuffled = drops.sample(frac=1, random_state=seed)
    assert measures(shuffled) == pytest.approx(measures(drops))
    pd.testing.assert_frame_equal(deposit(shuffled).drops, deposit(drops).drops)
    renamed = drops.assign(head=4 - drops["head"], layer=2 - drops["layer"])
    assert measures(renamed) == pytest.approx(measures(drops))
    one, other = deposit(drops), deposit(renamed)
    assert (one.layer, one.head) == (2 - (other.layer or 0), 4 - (other.head or 0))


@pytest.mark.parametrize("seed", range(5))
def test_units_do_not_matter_to_shares(seed: int) -> None:
    drops = random_table(seed)
    scaled = drops.assign(effect=drops["effect"] * 7.5)
    expected = np.array(measures(drops)) * [7.5, 7.5, 1, 1]
    assert measures(scaled) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_bounds(seed: int) -> None:
    """One over the share is at most the effective number: of all means of p, the largest is the maximum."""
    drop, second, share, effective = measures(random_table(seed))
    assert 1 / 15 <= share <= 1
    assert 1 / share <= effective + 1e-12 <= 15 + 1e-12
    assert drop >= second >= 0


def test_heads_that_cost_nothing_do_not_count() -> None:
    few, many = table([[0.5, 0.2]]), table([[0.5, 0.2, 0.0, -0.3], [0.0, 0.0, -0.1, 0.0]])
    assert measures(many) == pytest.approx(measures(few))


def test_a_loss_is_better_the_lower() -> None:
    drops = random_table(0)
    as_loss = drops.assign(effect=-drops["effect"])
    assert measures(as_loss, better="lower") == measures(drops)
    assert measures(as_loss) != pytest.approx(measures(drops))


def test_spread_over_reports() -> None:
    reports = [deposit(table([[x, 0.1]])) for x in (0.3, 0.5, 0.7)] + [deposit(table([[0.0, 0.0]]))]
    spread = deposit_spread(reports)
    drops, shares = [0.3, 0.5, 0.7, 0.0], [0.75, 5 / 6, 0.875]
    assert spread.loc["drop"].tolist() == pytest.approx([np.mean(drops), np.std(drops, ddof=1), 0.0, 0.7, 4])
    assert spread.loc["share"].tolist() == pytest.approx([np.mean(shares), np.std(shares, ddof=1), 0.75, 0.875, 3])
    assert spread.loc["layer"].tolist() == [0, 0, 0, 0, 3]
    assert "head" not in spread.index
    assert deposit_spread(reports[:1])["std"].isna().all()


# --- drops of a model -------------------------------------------------------------------------------------------

TASK = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=4, max_length=9, n_ctx=12)


def untrained(task: Any = TASK, **shape: Any) -> SyntheticModel:
    sizes = {"d_vocab": task.d_vocab, "n_ctx": task.n_ctx, "n_out": task.n_out, "pad_id": task.pad_id}
    return SyntheticModel(SyntheticConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=16, **sizes, **shape), seed=3)


@pytest.mark.parametrize(
    "shape", [{}, {"read_out": "last"}, {"read_out": "token", "causal": True}, {"encoding": "mla"}]
)
def test_drops_are_what_evaluate_says_without_the_head(shape: Any) -> None:
    model = untrained(**shape)
    tokens, labels = TASK.batch(300, seed=1)
    drops = head_drops(model, tokens, labels, progress=False)
    assert drops["baseline"].tolist() == pytest.approx([evaluate(model, tokens, labels)[1]] * 4)
    expected = []
    for layer, head in zip(drops["layer"], drops["head"], strict=True):
        with model.hooks(fwd_hooks=ablate_heads(model, [(layer, head)])):
            expected.append(evaluate(model, tokens, labels)[1])
    assert drops["value"].tolist() == pytest.approx(expected, abs=1 / 300 + 1e-9)  # a tie may fall the other way
    assert len(set(drops["value"])) > 1


def test_drops_of_some_heads_another_way() -> None:
    model = untrained()
    tokens, labels = TASK.batch(600, seed=1)
    whole = (tokens != 0).sum(1) == 9  # of one length
    tokens, labels = tokens[whole, :9], labels[whole]
    drops = head_drops(model, tokens, labels, layers=[1], heads=[0], mode="resample", seed=4, progress=False)
    assert drops[["layer", "head"]].to_numpy().tolist() == [[1, 0]]
    with model.hooks(fwd_hooks=ablate_heads(model, [(1, 0)], mode="resample", seed=4)):
        logits = model(tokens)
    assert drops["value"][0] == pytest.approx((logits.argmax(-1) == labels).double().mean().item(), abs=0.0051)


# --- a study ----------------------------------------------------------------------------------------------------


def brief() -> Preset:
    """Two steps of the small one."""
    small = preset("small")
    return replace(small, training=replace(small.training, n_train=64, batch_size=32, n_test=60))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("study")
    study = deposit_study(
        brief(), encodings=["rope", "none"], tasks=["count"], seeds=[0, 2], samples=50, folder=folder, progress=False
    )
    return study, folder


@pytest.mark.slow
def test_a_study_is_its_parts(done: tuple[Any, Path]) -> None:
    study, folder = done
    assert list(study.reports) == [
        ("rope", "count", 0),
        ("none", "count", 0),
        ("rope", "count", 2),
        ("none", "count", 2),
    ]
    keys = study.drops[["encoding", "task", "seed"]].drop_duplicates()
    assert list(keys.itertuples(index=False, name=None)) == list(study.reports)
    split = brief().tasks["count"].split(64, 60)
    tokens, labels = split.test_tokens[:50], split.test_labels[:50]
    for n, ((encoding, task, seed), report) in enumerate(study.reports.items()):
        model = load_checkpoint(folder / "trainings" / f"{task}-{encoding}-seed{seed}" / "step-000002.safetensors")
        assert model.config.encoding == encoding
        assert report.baseline == pytest.approx(evaluate(model, tokens, labels)[1])
        own = study.drops[12 * n : 12 * (n + 1)]
        assert (own["mode"] == "zero").all()
        assert own["value"].tolist() == head_drops(model, tokens, labels, progress=False)["value"].tolist()
        assert deposit(own).to_frame().equals(report.to_frame())
        assert study.deposits()["share"][n] == report.share


def test_its_summary_is_over_seeds(done: tuple[Any, Path]) -> None:
    study, _ = done
    summary = study.summary().set_index("encoding")
    for encoding in ("rope", "none"):
        reports = [study.reports[encoding, "count", seed] for seed in (0, 2)]
        shares, row = [r.share for r in reports], summary.loc[encoding]
        accuracy = study.accuracy.query("encoding == @encoding")["accuracy"]
        assert (row["share"], row["share_std"]) == pytest.approx((np.mean(shares), np.std(shares, ddof=1)))
        assert (row["accuracy"], row["accuracy_std"]) == pytest.approx((accuracy.mean(), accuracy.std()))
        assert row["layers"] == " ".join(str(r.layer) for r in reports)
        assert (row["seeds"], row["chance"]) == (2, 1 / 17)
    assert "4 trainings" in repr(study)


@pytest.mark.slow
def test_a_study_of_both_modes_and_of_what_suffices(tmp_path: Path) -> None:
    """Each table is what its function says of the model; tables by mode and measure are deposits of those drops."""
    study = deposit_study(
        brief(), encodings=["rope", "none"], tasks=["count"], samples=20, modes=["mean", "zero"], sufficiency=True,
        folder=tmp_path, progress=False,
    )  # fmt: skip
    split = brief().tasks["count"].split(64, 60)
    tokens, labels = split.test_tokens[:20], split.test_labels[:20]
    for encoding, kinds in (("rope", ["rotation", "attention"]), ("none", ["attention"])):
        model = load_checkpoint(tmp_path / "trainings" / f"count-{encoding}-seed0" / "step-000002.safetensors")
        report, own = study.reports[encoding, "count", 0], study.drops[study.drops["encoding"] == encoding]
        assert [found.by for found in report.sufficient] == kinds
        for found, by in zip(report.sufficient, kinds, strict=True):
            assert found.heads == sufficient_heads(model, tokens, labels, by=by).heads  # type: ignore[arg-type]
        for mode in ("mean", "zero"):
            drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
            assert own[own["mode"] == mode]["loss_value"].tolist() == drops["loss_value"].tolist()
            for measure in ("metric", "loss"):
                row = study.deposits(measure, mode).set_index("encoding").loc[encoding]  # type: ignore[arg-type]
                assert row["drop"] == deposit(drops, measure=measure).drop  # type: ignore[arg-type]
    table = pd.read_csv(tmp_path / "sufficient.csv")
    assert table["by"].tolist() == ["rotation", "attention", "attention"]
    assert table["heads"].tolist() == study.sufficient()["heads"].tolist()
    assert [len(str(some).split()) if n else 0 for some, n in zip(table["set"], table["heads"], strict=True)] == table[
        "heads"
    ].tolist()
    with pytest.raises(ValueError, match="mode must be 'mean' or 'zero', got 'resample'"):
        study.deposits(mode="resample")


def test_what_is_kept_is_read_as_it_was(done: tuple[Any, Path]) -> None:
    study, folder = done
    tables = {"accuracy": study.accuracy, "drops": study.drops, "deposit": study.deposits(), "summary": study.summary()}
    for name, kept in tables.items():
        pd.testing.assert_frame_equal(pd.read_csv(folder / f"{name}.csv"), kept, check_dtype=False)


def test_what_is_done_is_not_done_again(done: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    study, folder = done
    options: Any = {
        "encodings": ["rope", "none"],
        "tasks": ["count"],
        "seeds": [0, 2],
        "samples": 50,
        "progress": False,
    }
    monkeypatch.setattr(
        "tl_posdisent.synthetic.training.loop.TrainingLoop._step", lambda self: pytest.fail("trained again")
    )
    again = deposit_study(brief(), folder=folder, **options)
    pd.testing.assert_frame_equal(again.drops, study.drops)
    pd.testing.assert_frame_equal(again.accuracy, study.accuracy)


def test_tables_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = study_module.head_drops, []

    def fails_the_second_time(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(study_module, "head_drops", fails_the_second_time)
    with pytest.raises(KeyboardInterrupt):
        deposit_study(brief(), encodings=["rope", "none"], tasks=["count"], folder=tmp_path, progress=False)
    assert pd.read_csv(tmp_path / "accuracy.csv")["encoding"].tolist() == ["rope"]
    assert len(pd.read_csv(tmp_path / "drops.csv")) == 12


@pytest.mark.usefixtures("unchecked")
def test_a_mistake_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoding must be 'none', "):
        deposit_study(brief(), encodings=["rope", "rotary"], folder=tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


def test_nothing_global_is_touched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = untrained().train()
    head_drops(model, *TASK.batch(20, seed=1), progress=False)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
