"""Studies of ``docs/findings``: numbers against brute force, and committed tables against what the studies give."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from support.pages import ROOT
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tl_posdisent as tp
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.experiments import MultipleChoice, choice_scores, dummy_distance_check, perturb

FOLDER = ROOT / "docs" / "findings"
TABLES = sorted((FOLDER / "tables").glob("*.csv"))
MODULES = ("positions", "heads", "robustness")
SIZES: dict[str, dict[str, Any]] = {
    "positions": {"LENGTH": 24, "TEXTS": 2, "LONG": 48, "LONG_TEXTS": 2, "FEWER": 2},
    "heads": {
        "LENGTH": 24,
        "MEASURED": 2,
        "FITTED": 8,
        "HELD_OUT": 2,
        "CANDIDATES": 18,
    },  # half of FITTED for the demo text
    "robustness": {"LENGTH": 48, "TEXTS": 2, "DRAWS": 3, "QUESTIONS": 3},
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module")
def findings() -> Iterator[Any]:
    """The scripts by name, for small texts; questions are asked about the demo text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import heads
        import positions
        import robustness
        import rows
        import texts

        scripts = SimpleNamespace(heads=heads, positions=positions, robustness=robustness, rows=rows, texts=texts)
        for name, sizes in SIZES.items():
            for size, value in sizes.items():
                patch.setattr(sys.modules[name], size, value)
            patch.setattr(sys.modules[name], "how_many", lambda model, source, n: n)  # every row, also of the demo text
        patch.setattr(robustness, "documents", lambda source: [tp.demo_text()])
        yield scripts


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers of twelve heads with large random weights, and the demo model's tokenizer."""
    size = {"hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 12}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1100, max_position_embeddings=256, initializer_range=0.5, **size)
    return tp.bridge_from_hf(LlamaForCausalLM(config), tokenizer=demo_tokenizer())


@pytest.fixture(scope="module")
def given(findings: Any, model: Any) -> dict[str, pd.DataFrame]:
    """What each study gives, by name."""
    found = {}
    for name in MODULES:
        script = getattr(findings, name)
        for study in script.STUDIES:
            source = "speeches" if study == "questions" else "demo"
            found[study] = pd.DataFrame(getattr(script, study)(model, source)).set_index("name")
    return found


def loss(model: Any, text: Tensor, hooks: Any = (), first: int = 1) -> float:
    """The loss of one text from a position on, by TransformerLens."""
    with torch.no_grad():
        by_token = model.run_with_hooks(text[None], return_type="loss", loss_per_token=True, fwd_hooks=list(hooks))
    return float(by_token[0, first - 1 :].mean())


def texts_of(findings: Any, model: Any, n: int, length: int = 24) -> Tensor:
    found: Tensor = findings.texts.parts(model, "demo", n, length)
    return found


def test_losses_are_those_of_a_loop(findings: Any, model: Any) -> None:
    texts, hooks = texts_of(findings, model, 3), tp.dummy_distance(model, 5)
    for first in (1, 12):
        expected = [loss(model, text, hooks, first) for text in texts]
        assert findings.rows.losses(model, texts, hooks, first).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("length", [7, 8])
def test_a_repeated_text_is_its_first_half_twice(findings: Any, length: int) -> None:
    texts = torch.arange(2 * length).view(2, length)
    half = (length - 1) // 2
    expected = [[row[0], *row[1 : half + 1], *row[1 : half + 1]] for row in texts.tolist()]
    assert findings.texts.repeated(texts).tolist() == expected


def test_second_copies_are_measured_from_their_second_token_on(
    findings: Any, model: Any, given: dict[str, pd.DataFrame]
) -> None:
    texts = findings.texts.repeated(texts_of(findings, model, 2))
    second = texts.shape[1] // 2 + 2
    assert texts[0, second].item() == texts[0, 2].item()
    hooks = tp.remap_distance(model, lambda d: d.clamp(max=16))
    added = [loss(model, text, hooks, second) - loss(model, text, (), second) for text in texts]
    table = given["ceilings"]
    row = table.loc["added loss, distances at most 16, second copy of a passage"]
    assert row["value"] == pytest.approx(sum(added) / 2, abs=1e-5)
    assert row["error"] == pytest.approx(abs(added[0] - added[1]) / 2, abs=1e-5)


def test_restored_layers_are_those_of_a_loop(findings: Any, model: Any, given: dict[str, pd.DataFrame]) -> None:
    texts, table = texts_of(findings, model, 2), given["layers"]
    restored = torch.tensor(
        [
            [
                loss(model, text, tp.dummy_distance(model, 5))
                - loss(model, text, tp.dummy_distance(model, 5, layers=[n]))
                for text in texts
            ]
            for n in (1, 0)  # the other layer is restored
        ]
    )
    most = restored.mean(1).amax().item()
    assert table.loc["nats restored, layer with most", "value"] == pytest.approx(most, abs=1e-5)
    alone = [
        sum(loss(model, text, tp.dummy_distance(model, 5, layers=[n])) - loss(model, text) for n in (0, 1))
        / (loss(model, text, tp.dummy_distance(model, 5)) - loss(model, text))
        for text in texts
    ]
    sums = table.loc["costs of single layers over the cost of all", "value"]
    assert sums == pytest.approx(sum(alone) / 2, rel=1e-3)


def test_shares_by_third_of_the_layers(findings: Any) -> None:
    effects = torch.tensor([[1.0, 2.0], [3.0, 0.0], [-5.0, -1.0], [2.0, 2.0], [0.0, 0.0], [4.0, 4.0]])
    rows = {row.name: row for row in findings.positions.by_third("x", effects)}
    shares = [rows[f"share of x, {third} third of the layers"] for third in ("first", "second", "last")]
    assert [row.value for row in shares] == pytest.approx([(0.4 + 0.25) / 2, (0.2 + 0.25) / 2, (0.4 + 0.5) / 2])
    assert shares[0].error == pytest.approx(0.15 / 2)
    assert rows["share of x, layer with most"][1:] == pytest.approx((0.45, 0.05, "2 texts", 24, "layer 5"))


def test_key_components_are_those_of_a_run_at_a_dummy_distance(findings: Any, model: Any) -> None:
    (text,) = texts_of(findings, model, 1, 96)
    runs = dummy_distance_check(model, text[None], distances=[1, 8, 64], progress=False).set_index(
        ["layer", "distance"]
    )
    seen = torch.ones(96, 96).tril().bool()
    for layer in findings.positions.captured(model, text):
        table, means = findings.positions.unchanged(layer), findings.positions.mean_scores(layer)
        for d in (1, 8, 64):
            run = runs.loc[layer.layer, d].sort_values("head")
            of_run = run["key_correlation"].to_numpy()
            assert table[f"key component, own and distance {d}"].to_numpy() == pytest.approx(of_run, abs=1e-5)
            assert means[:, d].numpy() == pytest.approx(run["mean"].to_numpy(), abs=1e-5)
            by_pair = findings.positions.at_distance(layer, d)[0][:, seen]
            assert means[:, d].numpy() == pytest.approx(by_pair.mean(-1).numpy(), abs=1e-4)


def test_a_shift_by_the_distance_component_and_a_line_has_slope_one(findings: Any) -> None:
    component, d = torch.randn(3, 64), torch.arange(64)
    found = findings.positions.shifts(2.5 * component + 0.3 * d - 1, component)
    of = {name.partition(", ")[2]: values for name, values in found.items()}
    for name in ("distances", "distances below 16", "distances from 16 on"):
        assert of[f"{name}, correlation"].tolist() == pytest.approx([1] * 3, abs=1e-4)
        assert of[f"{name}, slope"].tolist() == pytest.approx([2.5] * 3, abs=1e-4)
        assert of[f"{name}, correlation with another head's"].abs().max() < 0.9


def test_bounds_hold(given: dict[str, pd.DataFrame]) -> None:
    values = given["bound"]["value"]
    assert (values.filter(like="valid") == 1).all()
    for component in ("distance:key", "distance:query:key"):
        share, pairwise, separate = (values[f"{component}, {x}, trained"] for x in ("share", "pairwise", "separate"))
        assert 0 < share < pairwise < separate


def test_attention_in_a_window_is_the_heads_own_pattern_cut_and_renormalised(
    findings: Any, model: Any, given: dict[str, pd.DataFrame]
) -> None:
    texts = texts_of(findings, model, 6)
    heldout, fitted = texts[:2], texts[2:]
    near = torch.ones(24, 24).tril().bool() & ~torch.ones(24, 24).tril(-8).bool()
    near[:, 0] = True

    def cut(pattern: Tensor, hook: Any) -> Tensor:
        kept = pattern * near
        return kept / kept.sum(-1, keepdim=True)

    _, cache = model.run_with_cache(fitted)
    means = {f"blocks.{n}.attn.hook_z": cache["z", n].mean((0, 1)) for n in (0, 1)}
    window = [(f"blocks.{n}.attn.hook_pattern", cut) for n in (0, 1)]
    mean = [(name, lambda z, hook, x=x: x.expand_as(z)) for name, x in means.items()]
    shares = [
        (loss(model, text, mean) - loss(model, text, window)) / (loss(model, text, mean) - loss(model, text))
        for text in heldout
    ]
    found = given["rungs"].loc["attention kept, own in a window of 8 and the first token", "value"]
    assert found == pytest.approx(sum(shares) / 2, rel=1e-3)
    assert given["rungs"].loc["attention kept, own in a window of 32 and the first token", "value"] == pytest.approx(1)


def test_sets_of_heads_give_back_what_a_loop_gives(findings: Any, model: Any, given: dict[str, pd.DataFrame]) -> None:
    texts, table = texts_of(findings, model, 4)[2:], given["sets"]
    assert not set(table["call"]) & {""}
    every = [(layer, head) for layer in range(2) for head in range(12)]
    for name in ("16 heads of largest curvature", "8 heads of a greedy search"):
        heads = table.loc[f"nats given back by {name}", "call"]
        some = [(int(x[1 : x.index("H")]), int(x[x.index("H") + 1 :])) for x in heads.split()]
        others = tp.dummy_distance(model, 5, heads=[head for head in every if head not in some])
        back = [loss(model, text, tp.dummy_distance(model, 5)) - loss(model, text, others) for text in texts]
        assert table.loc[f"nats given back by {name}", "value"] == pytest.approx(sum(back) / 2, abs=1e-5)
        assert len(set(some)) == int(name.split()[0])


def test_a_greedy_search_begins_with_the_best_head(findings: Any, model: Any) -> None:
    texts = texts_of(findings, model, 2)
    every = [(layer, head) for layer in range(2) for head in range(12)]
    by_head = {
        head: sum(
            loss(model, text, tp.dummy_distance(model, 5, heads=[x for x in every if x != head])) for text in texts
        )
        for head in every[6:]
    }
    first, second = findings.heads.greedy(model, texts, every[6:], 2)
    assert by_head[first] == pytest.approx(min(by_head.values()), abs=1e-5)
    assert second in every[6:]
    assert second != first


def test_a_ratio_has_the_error_of_leaving_out_one_pair_after_another(findings: Any) -> None:
    y = torch.tensor([1.0, 2.0, 4.0, 3.0])
    assert findings.robustness.ratio(1.5 * y, y) == pytest.approx((1.5, 0), abs=1e-6)
    x = torch.tensor([2.0, 2.0, 5.0, 6.0])
    left = [13 / 9, 13 / 8, 10 / 6, 9 / 7]
    spread = sum((each - sum(left) / 4) ** 2 for each in left)
    assert findings.robustness.ratio(x, y) == pytest.approx((1.5, (0.75 * spread) ** 0.5))


def test_perturbation_is_that_of_one_text_and_one_draw_at_a_time(
    findings: Any, model: Any, given: dict[str, pd.DataFrame]
) -> None:
    texts = texts_of(findings, model, 2, 48)
    by_draw = []
    for seed in range(3):
        found = []
        for text in texts:
            perturbed = perturb(model, text[None], "index", 0.25, seed=seed)
            with torch.no_grad():
                before, now = (
                    model.run_with_hooks(text[None], return_type="loss", loss_per_token=True, fwd_hooks=list(hooks))[0]
                    for hooks in ([], perturbed.hooks)
                )
            found.append((now - before)[perturbed.intact[0]].mean())
        by_draw.append(torch.stack(found).mean())
    row = given["perturbation"].loc["added loss, index, 25%"]
    assert row["value"] == pytest.approx(torch.stack(by_draw).mean().item(), abs=1e-5)
    assert row["error"] == pytest.approx(torch.stack(by_draw).std().item() / 3**0.5, abs=1e-5)


def test_answers_are_those_of_multiple_choice(findings: Any, model: Any) -> None:
    asked = findings.robustness.questions_of(model, tp.demo_text())[:6]
    assert len({choices[0] for _, choices in asked}) > 3
    for fraction in (0.0, 1.0):
        change = partial(perturb, model, kind="order", fraction=fraction)
        right = []
        for context, choices in asked:
            question = MultipleChoice(context, [torch.tensor([choice]) for choice in choices], 0)
            right.append(float(choice_scores(model, question, perturb=change).argmax() == 0))
        assert findings.robustness.answers(model, asked, fraction).tolist() == right


def test_committed_tables_are_there() -> None:
    assert {"smollm2_demo", "smollm2_speeches", "gemma3-270m_speeches"} <= {path.stem for path in TABLES}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_tables_have_the_rows_that_their_studies_give(path: Any, given: dict[str, pd.DataFrame]) -> None:
    table = pd.read_csv(path)
    assert table.columns.tolist() == ["study", "name", "value", "error", "over", "length", "call"]
    for study, rows in table.groupby("study"):
        if study in given:
            names = set(rows["name"])
            assert len(names) == len(rows)
            assert names <= set(given[study].index)
            if path.stem == "smollm2_speeches":
                assert names == set(given[study].index)
            assert rows["value"].notna().all()
