"""``compare_heads`` against two tables of ``where_or_what``, plain jackknives, copies, and heads that were changed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow

from tl_posdisent import compare_heads, demo_tokens, load_demo_model, read_model, where_or_what
from tl_posdisent.experiments.where_what.changes import COMPARED, TESTED, compared, table_of_changes
from tl_posdisent.experiments.where_what.measurement import HeadRuns, ModelToMeasure, heads_to_run, measure
from tl_posdisent.experiments.where_what.replacements import (
    CONSTANTS,
    DISTANCE,
    GATE,
    MEAN,
    UNIFORM,
    content_alone,
    folds,
)
from tl_posdisent.hooks.hook_list import any_heads, pairs_of
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.partial_forward import block_facts

pytestmark = pytest.mark.filterwarnings("ignore:texts have")
TEXTS = zoo.random_tokens(12, 4, seed=1)
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
QUIET: dict[str, Any] = {"progress": False, "draws": 1}


def changed(kind: str, name: str, size: float = 0.3) -> Any:
    """A model whose weights all have other values, the more the larger ``size`` is."""
    other, generator = zoo.load(kind, name), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in other.parameters():
            x.add_(size * x.std() * torch.randn(x.shape, generator=generator) if x.numel() > 1 else 0)
    return other


# --- what a row is made of --------------------------------------------------------------------------------------


@FEW
def test_both_sides_are_those_of_where_or_what(kind: str, name: str, shared_model: Any) -> None:
    """With runs of the same heads: values, errors and verdicts, of heads that were not run too."""
    before = shared_model(kind, name)
    after, some = changed(kind, name), {"heads": [1, 2, 6], "exact": ["L0H1", "L1H6", "L1H2"]}
    table = compare_heads(before, after, TEXTS, **some, **QUIET)
    for when, model in {"before": before, "after": after}.items():
        own = where_or_what(model, TEXTS, **some, **QUIET)
        for column in COMPARED:
            for end in ("", "_se"):
                found, expected = table[f"{column}_{when}{end}"], own[f"{column}{end}"]
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=column)
        assert table[f"verdict_{when}"].tolist() == own["verdict"].tolist()
        assert table["measured"].tolist() == own["measured"].tolist()
    for column in COMPARED:
        difference = table[f"{column}_after"] - table[f"{column}_before"]
        np.testing.assert_allclose(table[f"{column}_change"], difference, rtol=1e-6, atol=1e-9)
    assert table["contribution_change"].abs().max() > 1e-3


@pytest.mark.slow
def test_the_same_heads_are_run_in_both(shared_model: Any) -> None:
    """Those that would be run in one of the two."""
    before = shared_model("bridge", "llama-gqa")
    after = changed("bridge", "llama-gqa", 1.0)
    table = compare_heads(before, after, TEXTS, exact=3, **QUIET)
    own = [where_or_what(model, TEXTS, exact=3, **QUIET)["measured"] == "run" for model in (before, after)]
    assert (table["measured"] == "run").tolist() == (own[0] | own[1]).tolist()
    assert own[0].tolist() != own[1].tolist()


def divergences(n_texts: int, n_heads: int, generator: np.random.Generator, spread: float = 0.5) -> Any:
    """Divergences of each text and head with a heavy tail, none of whose shares has to be clipped."""
    size = 0.05 * generator.lognormal(0, spread, (n_texts, n_heads))
    lost = {DISTANCE: 0.5, UNIFORM: 0.9, GATE: 0.7} | {
        content_alone(x): y for x, y in zip(CONSTANTS, (0.6, 0.7, 0.8), strict=True)
    }
    noise = {name: x * generator.lognormal(0, spread / 10, size.shape) for name, x in lost.items()}
    return {MEAN: torch.tensor(size)} | {name: torch.tensor(size * x) for name, x in noise.items()}


def test_errors_are_those_of_a_plain_jackknife() -> None:
    """Of the difference of the two estimates that leave out the same text."""
    n, generator = 7, np.random.default_rng(0)
    sides = [divergences(n, 3, generator) for _ in range(2)]
    pairs, counts = [(0, 0), (0, 1), (1, 0)], torch.full((n,), 11.0, dtype=torch.float64)
    found = compared(pairs, 5, *(HeadRuns(x, x) for x in sides), [0, 1, 2], counts)

    def change(rows: list[int]) -> dict[str, Any]:
        """After minus before of some texts, by plain means."""
        both = []
        for side in sides:
            k = {name: x[rows].numpy().mean(0) for name, x in side.items()}
            p, u = (1 - k[name] / k[MEAN] for name in (DISTANCE, UNIFORM))
            c = 1 - k[content_alone(1)] / k[MEAN]  # by far the best in all texts
            where, what = (p - u + 1 - c) / 2, (c - u + 1 - p) / 2
            both.append([k[MEAN], where, what, u, p - c])
        return dict(zip(COMPARED, np.array(both[1]) - np.array(both[0]), strict=True))

    without = [change([row for row in range(n) if row != out]) for out in range(n)]
    for name in COMPARED:
        values = np.array([x[name] for x in without])
        error = np.sqrt((n - 1) / n * ((values - values.mean(0)) ** 2).sum(0))
        value, se = found.change(name)
        np.testing.assert_allclose(value, change([*range(n)])[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(se, error, rtol=1e-9)


def test_errors_of_estimated_changes_are_how_far_those_of_runs_were_off() -> None:
    """Estimates that are all too small by the same factor have the right relative changes, and add no error."""
    generator = np.random.default_rng(1)
    pairs, counts = [(0, head) for head in range(4)], torch.full((8,), 10.0, dtype=torch.float64)
    runs = [divergences(8, 4, generator) for _ in range(2)]
    small = [{name: x / 3 for name, x in of_side.items()} for of_side in runs]
    places = [0, 1, 2]
    some = [{name: x[:, places] for name, x in of_side.items()} for of_side in runs]
    whole = compared(pairs, 5, *(HeadRuns(x, x) for x in runs), [0, 1, 2, 3], counts)
    found = compared(pairs, 5, *map(HeadRuns, small, some), places, counts)
    for name in COMPARED:
        for one, other in zip(found.change(name), whole.change(name), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-12)

    # Half of the largest change is missed in one of the three heads that were run.
    missed = [small[0], {name: x.clone() for name, x in small[1].items()}]
    missed[1][MEAN][:, 0] *= 2
    assert (compared(pairs, 5, *map(HeadRuns, missed, some), places, counts).change("contribution").error[3]) > (
        2 * whole.change("contribution").error[3]
    )


# --- error rates ------------------------------------------------------------------------------------------------


RATES = slow([(8, 0.5, 0.05), (8, 1.5, 0.15)])


@pytest.mark.parametrize(("n_texts", "spread", "stated"), RATES)
def test_equal_heads_seldom_change(n_texts: int, spread: float, stated: float) -> None:
    """Of 100 comparisons of heads that are alike in both models, those that name a change of the contribution, and of
    a part: three times as many of the heaviest tails, where one text may have half of the sum."""
    n_heads, wrong = 6, np.zeros(2)
    pairs, counts = [(0, head) for head in range(n_heads)], torch.full((n_texts,), 60.0, dtype=torch.float64)
    for seed in range(100):
        generator = np.random.default_rng((seed, n_texts))
        sides = [HeadRuns(x, x) for x in (divergences(n_texts, n_heads, generator, spread) for _ in range(2))]
        table = table_of_changes(pairs, compared(pairs, 5, *sides, [*range(n_heads)], counts), 0.0005)
        wrong += [table["changed"].str.contains(word).any() for word in ("contributes", "where|what|neither")]
    assert wrong.max() <= 100 * (stated + 2 * (stated * (1 - stated) / 100) ** 0.5)


def test_planted_changes_are_found_and_named() -> None:
    generator = np.random.default_rng(0)
    pairs, counts = [(0, head) for head in range(40)], torch.full((8,), 60.0, dtype=torch.float64)
    before = divergences(8, 40, generator)
    after = {name: x.clone() for name, x in before.items()}
    for name in after:
        after[name] *= torch.tensor(generator.lognormal(0, 0.02, (8, 40)))
        after[name][:, 0] *= 0.3
    after[DISTANCE][:, 1], after[content_alone(1)][:, 1] = before[content_alone(1)][:, 1], before[DISTANCE][:, 1]
    after[UNIFORM][:, 2] *= 0.5
    table = table_of_changes(
        pairs, compared(pairs, 5, HeadRuns(before, before), HeadRuns(after, after), [*range(40)], counts), 5e-4
    )
    assert table["changed"][:3].tolist()[0] == "contributes less"
    assert table["changed"][1] == "less where, more what"
    assert table["changed"][2] == "less where, less what, more neither"
    assert (table["changed"][3:] != "").mean() < 0.1


@pytest.mark.slow
def test_a_copy_under_other_draws_does_not_change() -> None:
    """The demo model's estimates by draws of two seeds, beside the same runs of five heads."""
    model, tokens, seeds = load_demo_model(), demo_tokens(length=384).view(8, 48), range(6)
    reading = read_model(model)
    chosen = any_heads(reading, None, None)
    pairs = pairs_of(chosen)
    with running(model) as p:
        _, of_folds = folds(reading, tokens, None, chosen)
        subject, none = ModelToMeasure(reading, of_folds, block_facts(p)), heads_to_run(reading, pairs, 0)
        measured = [measure([subject], pairs, none, draws=4, seed=seed, progress=False) for seed in seeds]
    places = [pairs.index(pair) for pair in [(3, 0), (4, 2), (2, 6), (0, 1), (3, 1)]]
    (first, _, n_predictions), found = measured[0], [runs[0].estimated for runs, _, _ in measured]
    run = {name: x[:, places] for name, x in first[0].estimated.items()}
    sides = [HeadRuns(estimated, run) for estimated in found]
    tables = [
        table_of_changes(pairs, compared(pairs, 5, one, other, places, n_predictions), 5e-4)
        for n, one in enumerate(sides)
        for other in sides[:n]
    ]
    assert sum(bool((table["changed"] != "").any()) for table in tables) <= 1  # of 15


# --- two models -------------------------------------------------------------------------------------------------


@FEW
def test_copies_are_equal(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = compare_heads(model, zoo.load(kind, name), TEXTS, heads=[1, 6], exact=2, **QUIET)
    for column in COMPARED:
        assert (table[f"{column}_change"] == 0).all()
        assert (table[f"{column}_before"] == table[f"{column}_after"]).all()
    rates = table[[f"{column}_q" for column in TESTED]]
    assert (rates.isna() | (rates == 1)).all(axis=None)
    assert (table["changed"] == "").all()
    assert table["same_weights"].all()
    assert table.attrs["statement"] == "All weights of the two models are equal. All differences are 0."
    assert "Empty" not in repr(table) + table._repr_html_()
    assert repr(table).startswith(table.attrs["statement"])


@pytest.mark.slow
@FEW
def test_heads_with_the_same_weights(kind: str, name: str, shared_model: Any) -> None:
    """Of grouped heads, those that share keys change together; a norm is that of all heads of its layer."""
    model = shared_model(kind, name)
    spec, after = read_model(model).specs(1)[0], zoo.load(kind, name)
    with torch.no_grad():
        after.blocks[0].attn.W_O[2].mul_(1.5)
        key = after.blocks[1].attn._W_K if kind == "hooked" and spec.n_kv_heads < 8 else after.blocks[1].attn.W_K
        key[1].mul_(1.5)
    table = compare_heads(model, after, TEXTS, exact=0, **QUIET)
    group = 8 // spec.n_kv_heads
    expected = {(0, 2), *((1, head) for head in range(group, 2 * group))}
    assert {(x.layer, x.head) for x in table[~table["same_weights"]].itertuples()} == expected
    with torch.no_grad():
        next(after.blocks[1].ln1.parameters()).mul_(1.5)
    table = compare_heads(model, after, TEXTS, layers=1, exact=0, **QUIET)
    assert not table["same_weights"].any()


def test_weights_of_latent_attention_are_those_of_the_layer(shared_model: Any) -> None:
    model, after = shared_model("bridge", "deepseek_v3"), zoo.load("bridge", "deepseek_v3")
    with torch.no_grad():
        next(after.blocks[1].attn.parameters()).mul_(1.5)
    table = compare_heads(model, after, TEXTS, heads=[0, 3], exact=0, **QUIET)
    assert table["same_weights"].tolist() == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("backend", zoo.KINDS)
def test_the_head_that_was_scaled_comes_first_and_others_make_up_for_it(backend: Any) -> None:
    """L3H0 of the demo model writes less; no head of an earlier layer has other weights, or other inputs."""
    before, tokens = load_demo_model(backend=backend), demo_tokens(length=512).view(8, 64)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.blocks[3].attn.W_O[0].mul_(0.3)
    table = compare_heads(before, after, tokens, exact=["L3H0", "L3H1", "L4H0", "L2H6", "L0H1"], progress=False)
    head = table["layer"].eq(3) & table["head"].eq(0)
    assert table["contribution_change"].abs().idxmax() == head.idxmax()
    assert table.loc[head, "changed"].item().startswith("contributes less")
    assert (~table["same_weights"]).tolist() == head.tolist()
    more = table[table["changed"].str.contains("contributes more")]
    assert len(more)
    assert f"contributes more {len(more)} " in table.attrs["statement"]
    assert f"{len(table[table['changed'] != '']) - 1} of them have the weights they had" in table.attrs["statement"]


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_another_rotary_base_is_found_with_equal_weights(kind: str) -> None:
    before, after = (zoo.load(kind, "llama-gqa") for _ in range(2))
    if kind == "bridge":
        after.original_model.model.rotary_emb.inv_freq.pow_(2)
    else:
        for block in after.blocks:
            angles = torch.atan2(block.attn.rotary_sin, block.attn.rotary_cos)[1] ** 2
            angles = torch.arange(len(block.attn.rotary_sin))[:, None] * angles
            block.attn.rotary_sin.copy_(angles.sin())
            block.attn.rotary_cos.copy_(angles.cos())
    table = compare_heads(before, after, TEXTS, heads=[0, 5], exact=2, **QUIET)
    assert table["same_weights"].all()
    assert table["contribution_change"].abs().min() > 0
    assert table.attrs["statement"].startswith("All weights of the two models are equal; settings or buffers differ.")


@pytest.mark.slow
def test_hooks_on_the_models_are_noted(shared_model: Any) -> None:
    model, after = shared_model("bridge", "llama-gqa"), zoo.load("bridge", "llama-gqa")
    point, other = "blocks.1.attn.hook_z", "blocks.0.hook_resid_pre"
    hooks = [(point, lambda z, hook: 0 * z)]
    with after.hooks(fwd_hooks=hooks), model.hooks(fwd_hooks=[(other, lambda x, hook: x)]):
        table = compare_heads(model, after, TEXTS, layers=1, heads=[0, 5], exact=1, **QUIET)
    assert table.attrs["statement"].endswith(f"Measured under hooks of your own at {other}, {point}.")
    assert (table["verdict_after"] == "not used").all()
    assert table["where_part_q"].isna().all()


@pytest.mark.usefixtures("unchecked")
def test_other_models_are_refused_by_what_differs(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")

    def like(**changed: Any) -> Any:
        config = copy.deepcopy(zoo.hf_model("llama-gqa").config)
        for name, value in changed.items():
            setattr(config, name, value)
        return zoo.as_bridge(type(zoo.hf_model("llama-gqa"))(config).eval())

    cases = {
        "architecture as before, LlamaForCausalLM, got GPTJForCausalLM": shared_model("bridge", "gptj"),
        "number of layers as before, 2, got 3": like(num_hidden_layers=3),
        "vocabulary as before, .* tokens, got 31 tokens": like(vocab_size=31),
        "attention in layer 0 as before, 8 heads of size 8, 4 of keys, .*, got 8 heads of size 8, 2 of keys": like(
            num_key_value_heads=2
        ),
    }
    for words, other in cases.items():
        with pytest.raises(ValueError, match=f"^after must have the same {words}"):
            compare_heads(model, other, TEXTS, progress=False)
    with pytest.raises(
        ValueError, match=r"^after must be another model than before, got the same one twice: .*deepcopy"
    ):
        compare_heads(model, read_model(model), TEXTS, progress=False)
    for name in ("before", "after"):
        both = {"before": model, "after": model} | {name: "model"}
        with pytest.raises(ValueError, match=f"^{name} must be a HookedTransformer, .* got 'model': load it"):
            compare_heads(**both, tokens=TEXTS, progress=False)


@pytest.mark.slow
def test_the_summary_counts_what_the_rows_say(shared_model: Any) -> None:
    before = shared_model("bridge", "llama-gqa")
    table = compare_heads(
        before, changed("bridge", "llama-gqa", 1.0), zoo.random_tokens(24, 16, seed=3), exact="all", **QUIET
    )
    assert (table["changed"] != "").any()
    shown = repr(table)
    for word in ("contributes more", "contributes less", "more where", "less what"):
        n = sum(word in said.split(", ") for said in table["changed"])
        assert (f"{word} {n} (" in table.attrs["statement"]) == (n > 0)
        assert (f" {word}" in shown) == (n > 0)
    assert isinstance(table[["layer", "head"]], pd.DataFrame)
    assert f"<p>{table.attrs['statement'][:20]}" in table._repr_html_()
