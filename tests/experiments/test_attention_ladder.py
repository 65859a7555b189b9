"""The ladder of additive attention: every row is the run that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L, fitted_layers, logits, put_in
from support.untouched import state
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    attention_ladder,
    demo_tokens,
    head_verdicts,
    load_demo_model,
    logit_difference,
    read_model,
)
from tl_posdisent.hooks import substitute_attention

pytestmark = pytest.mark.usefixtures("unchecked")
TRAIN = zoo.random_tokens(L + 2)
FEW = ("distance", "static", "additive")


def ladder(model: Any, **options: Any) -> pd.DataFrame:
    return attention_ladder(model, TRAIN, **{"heldout": TOKENS, "progress": False, **options})


def figures(model: Any, hooks: list[Any], tokens: Tensor = TOKENS) -> tuple[float, float, float]:
    """Loss, divergence from the untouched model, standard error of the change over blocks: by other means."""
    clean, changed = logits(model, [], tokens).double(), logits(model, hooks, tokens).double()
    loss, plain = (
        torch.nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        for x in (changed, clean)
    )
    kl = divergences(model, hooks, tokens).mean().item()
    return loss.mean().item(), kl, error_of(loss - plain, torch.ones_like(loss), len(tokens))


def divergences(model: Any, hooks: list[Any], tokens: Tensor = TOKENS) -> Tensor:
    """KL(untouched ‖ under hooks) of each prediction whose token is in the text."""
    p, q = (torch.distributions.Categorical(logits=logits(model, x, tokens)[:, :-1].double()) for x in ([], hooks))
    return torch.distributions.kl_divergence(p, q)


def error_of(top: Tensor, bottom: Tensor, n_texts: int) -> float:
    """The standard error of a ratio of sums over ten blocks: of its residuals, each block by its tokens."""
    ratio = top.sum() / bottom.sum()
    rest = (top - ratio * bottom).reshape(n_texts, -1).numpy()
    pieces = 10 // n_texts
    starts = [-(-k * rest.shape[1] // pieces) for k in range(1, pieces)]
    parts = [part for text in rest for part in np.split(text, starts)]
    squares = [part.sum() ** 2 / (1 - len(part) / rest.size) for part in parts]
    return float(sum(squares) ** 0.5 / abs(bottom.sum()))


def same(row: Any, expected: tuple[float, float, float]) -> None:
    assert (row.loss, row.kl, row.error) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_every_row_is_the_run_that_it_says(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = state(model)
    rows = ladder(model, layers=[0, 1], heads=[(0, 3), (1, 6)], rungs=FEW, controls=[])
    assert state(model) == before
    assert rows["rung"].tolist() == ["mean_output", "uniform", *FEW, "untouched"] * 2
    fits = {rung: fitted_layers(model, TRAIN, rung, replaced=False) for rung in FEW[:2]}
    for row in rows.itertuples():
        where = [(row.layer, row.head)]
        if row.rung in fits:
            hooks = put_in(model, fits[row.rung], where)
        elif row.rung == "mean_output":
            hooks = ablate_heads(model, where, mode="mean", reference=TRAIN)
        else:
            hooks = substitute_attention(model, row.rung, heads=where)
        same(row, figures(model, hooks))
        uniform, own = (divergences(model, x) for x in (substitute_attention(model, "uniform", heads=where), hooks))
        expected = [1 - (own.sum() / uniform.sum()).item(), error_of(uniform - own, uniform, 2)]
        expected.append(error_of(own, torch.ones_like(own), 2))
        assert [row.recovered_kl, row.se_kl, row.error_kl] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        ends = rows[(rows["layer"] == row.layer) & (rows["head"] == row.head)].set_index("rung")
        for baseline, recovered in (("uniform", row.recovered), ("mean_output", row.recovered_mean)):
            gap = ends["loss"][baseline] - ends["loss"]["untouched"]
            share = (ends["loss"][baseline] - row.loss) / gap if abs(gap) > ends["error"][baseline] else torch.nan
            assert recovered == pytest.approx(share, nan_ok=True)
        assert row.causal == (row.rung != "additive")
        assert row.blocks == 10
    assert rows.groupby("rung")["parameters"].first().to_dict() == {
        "mean_output": 8,
        "uniform": 0,
        "distance": L + 2,
        "static": L + 2 + 1 + 8,
        "additive": 2 * 2 * L,
        "untouched": 0,
    }
    assert rows[rows["rung"] == "untouched"][["kl", "error"]].abs().max().max() == 0


def static_by_hand(model: Any, layer: int, head: int) -> Tensor:
    """``d`` of ``softmax(d[i - j])``, fitted to the head's patterns on the training text by general optimisation."""
    with torch.no_grad():
        pattern = model.run_with_cache(TRAIN)[1]["pattern", layer][:, head].double()
    inside = torch.ones(pattern.shape[-2:]).tril().bool()
    pattern = 0.999 * pattern + 0.001 * inside / inside.sum(-1, keepdim=True)
    d = torch.zeros(len(inside), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([d], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def surprise() -> Tensor:
        optimiser.zero_grad()
        value = -(pattern * by_distance(d).clamp_min(1e-300).log()).sum()
        value.backward()
        return value

    optimiser.step(surprise)  # type: ignore[arg-type]
    return d.detach()


def by_distance(d: Tensor, length: int = L + 2) -> Tensor:
    at = torch.arange(length)
    distance = at[:, None] - at
    return d[distance.clamp_min(0)].masked_fill(distance < 0, -torch.inf).softmax(-1)


def test_rungs_without_keys_of_a_model_that_shows_none(shared_model: Any) -> None:
    """No products of Bloom's queries and keys are its scores, which have a bias of ALiBi."""
    model, layer, head = shared_model("bridge", "bloom"), 1, 3
    with pytest.raises(ValueError, match="of BloomForCausalLM: its scores are not scale"):
        ladder(model, heads=[(layer, head)], rungs=["static"], controls=[])
    rows = ladder(model, heads=[(layer, head)], rungs=["distance", "additive"]).set_index(["control", "rung"])
    patterns = {
        "uniform": torch.zeros(L + 2, dtype=torch.float64),
        "distance": static_by_hand(model, layer, head),
    }
    for rung, d in patterns.items():

        def put(pattern: Tensor, hook: Any, d: Tensor = d) -> Tensor:
            pattern = pattern.clone()
            pattern[:, head] = by_distance(d, L).to(pattern)
            return pattern

        expected = figures(model, [(f"blocks.{layer}.attn.hook_pattern", put)])
        same(rows.loc[("none", rung)], expected)
        assert expected[1] > 1e-4
    same(rows.loc[("none", "additive")], figures(model, substitute_attention(model, "additive", heads=[(layer, head)])))
    assert rows["kl"]["shuffled", "distance"] > rows["kl"]["none", "distance"]
    assert len(ladder(model, unit="layer", layers=0, rungs=["distance+sink", "additive"], controls=[])) == 5


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["layer", "all"])
def test_layers_and_the_whole_model(unit: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    rows = ladder(model, unit=unit, rungs=["first_token", *FEW], controls=[])
    assert len(rows) == 7 * (2 if unit == "layer" else 1)
    assert rows["head"].isna().all()
    assert rows["layer"].isna().all() == (unit == "all")
    fits = {rung: fitted_layers(model, TRAIN, rung, replaced=unit == "all") for rung in FEW[:2]}
    for row in rows.itertuples():
        layers = [0, 1] if unit == "all" else [int(row.layer)]
        if row.rung in fits:
            hooks = put_in(model, {layer: fits[row.rung][layer] for layer in layers})
        elif row.rung == "mean_output":
            hooks = ablate_heads(model, range(8), layers=layers, mode="mean", reference=TRAIN)
        else:
            hooks = substitute_attention(model, row.rung, layers=layers)
        same(row, figures(model, hooks))
        size = {"static": 8 * (L + 2 + 1 + 8), "additive": 8 * 2 * (L + L)}.get(row.rung)
        assert size is None or row.parameters == size * len(layers)


@pytest.mark.slow
def test_the_controls(shared_model: Any) -> None:
    """Of three tokens there are two orders with the first in place; all alike, a text is its own shuffle."""
    model = shared_model("bridge", "llama-gqa")
    options = {"heads": [(0, 3)], "rungs": ["static", "additive"], "progress": False}
    alike = attention_ladder(model, torch.full((1, 10), 7), **options)
    kinds = alike.groupby(["rung", "control"])["loss"].first().unstack()
    assert kinds["shuffled"].isna().sum() == 3
    assert (kinds["none"] - kinds["shuffled"]).abs().max() < 1e-6
    table = attention_ladder(model, TOKENS, **options)
    assert table["control"].tolist() == ["none"] * 5 + ["shuffled"] * 2
    fitted = table.pivot_table(index="rung", columns="control", values="loss")
    assert (fitted["none"] - fitted["shuffled"]).abs().loc[["static", "additive"]].min() > 1e-4
    demo = attention_ladder(load_demo_model(), demo_tokens(length=64), layers=3, unit="layer", rungs=["distance"])
    loss = demo.set_index(["control", "rung"])["loss"]
    gap = loss["none", "uniform"] - loss["none", "untouched"]
    assert gap > demo["error"].max()
    assert demo["recovered"].iloc[-1] == pytest.approx((loss["none", "uniform"] - loss["shuffled", "distance"]) / gap)
    assert not table[table["rung"] == "static"]["causal"].any()  # without held-out texts
    pd.testing.assert_frame_equal(table, attention_ladder(model, TOKENS, **options))


def test_a_padded_batch_is_its_texts(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones(2, L, dtype=torch.long)
    mask[0, :4] = 0
    options = {"heads": [(1, 6)], "rungs": ["static", "additive"], "controls": []}
    together = ladder(model, heldout={"input_ids": TOKENS, "attention_mask": mask}, **options)
    alone = [ladder(model, heldout=x, **options) for x in (TOKENS[:1, 4:], TOKENS[1:])]
    weights = torch.tensor([L - 5, L - 1])
    for column in ("loss", "kl"):
        expected = sum(x[column] * w.item() for x, w in zip(alone, weights, strict=True)) / weights.sum().item()
        assert (together[column] - expected).abs().max() < 1e-4
    both = attention_ladder(model, {"input_ids": TOKENS, "attention_mask": mask}, progress=False, **options)
    assert len(both) == 5


def test_the_first_token_alone(shared_model: Any) -> None:
    """Each head's result is the value of the first token that the query sees; beyond a window, the mean of values."""
    for name, window in (("llama-gqa", None), ("mistral", 6)):
        model = shared_model("bridge", name)
        layer = next(spec for spec in read_model(model).specs() if spec.window == window).layer
        v, z = f"blocks.{layer}.attn.hook_v", f"blocks.{layer}.attn.hook_z"
        with torch.no_grad(), model.hooks(fwd_hooks=substitute_attention(model, "first_token", layers=layer)):
            _, cache = model.run_with_cache(TOKENS, names_filter=[v, z])
        values = cache[v].unflatten(-1, (-1, cache[z].shape[-1])) if cache[v].ndim == 3 else cache[v]
        values = values.repeat_interleave(cache[z].shape[2] // values.shape[2], 2)
        expected = values[:, :1].expand_as(cache[z]).clone()
        for query in range(window or L, L):
            expected[:, query] = values[:, query - window + 1 : query + 1].mean(1)
        torch.testing.assert_close(cache[z], expected, rtol=1e-5, atol=1e-5)


# --- refusals -------------------------------------------------------------------------------------------------


def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = state(model)
    for options, words in (
        ({"rungs": ["static", "static"]}, "rungs must be some of uniform, .* each once"),
        ({"controls": ["random"]}, "controls must be some of shuffled, each once"),
        ({"heldout": {"ids": TOKENS}}, "heldout must be a mapping with input_ids, as a tokenizer .*, got one with ids"),
    ):
        with pytest.raises(ValueError, match=words):
            ladder(model, **options)
    longer = {"heldout": zoo.random_tokens(L + 3), "rungs": ["additive"], "unit": "all", "controls": []}
    assert len(ladder(model, **longer)) == 4
    assert state(model) == before


@pytest.mark.slow
def test_a_metric_of_prompts_of_several_lengths(shared_model: Any) -> None:
    """Its value is that of each prompt run alone; verdicts take gaps of either sign."""
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones_like(TOKENS)
    mask[1, L - 3 :] = 0
    metric = logit_difference(answers=[3, 4], wrong=[5, 6])
    options: dict[str, Any] = {"layers": [1], "heads": [0, 3], "rungs": FEW, "controls": []}
    texts = {"input_ids": TOKENS, "attention_mask": mask}
    rows = ladder(model, heldout=texts, metric=metric, **options)
    fits = {rung: fitted_layers(model, TRAIN, rung, replaced=False) for rung in FEW[:2]}
    for (_, head), some in rows.groupby(["layer", "head"]):
        values = {}
        for row in some.itertuples():
            where = [(1, int(head))]
            if row.rung in fits:
                hooks = put_in(model, fits[row.rung], where)
            elif row.rung == "mean_output":
                hooks = ablate_heads(model, where, mode="mean", reference=TRAIN)
            else:
                hooks = substitute_attention(model, row.rung, heads=where)
            last = [logits(model, hooks, x)[0, -1].double() for x in (TOKENS[:1], TOKENS[1:, : L - 3])]
            values[row.rung] = torch.stack([last[0][3] - last[0][5], last[1][4] - last[1][6]])
            assert row.value == pytest.approx(values[row.rung].mean().item(), abs=1e-5)
        gap, noise = (values["uniform"] - values["untouched"]).mean(), some.set_index("rung")["error"]["uniform"]
        for row in some.itertuples():
            change = values[row.rung] - values["untouched"]
            assert row.error == pytest.approx((change.std() / 2**0.5).item(), abs=1e-5)
            share = ((values["uniform"] - values[row.rung]).mean() / gap).item() if gap.abs() > noise else torch.nan
            assert row.recovered == pytest.approx(share, abs=1e-3, nan_ok=True)
    plain = ladder(model, heldout=texts, **options)
    pd.testing.assert_series_equal(plain["loss"], rows["loss"])
    assert "value" not in plain
    assert set(plain) - set(rows) == {"recovered_kl", "se_kl", "error_kl"}
    one = ladder(model, heldout=TOKENS[:1], metric=lambda logits, tokens: logits[0, -1, 7], **options)
    assert set(rows) - set(one) == {"se", "se_mean", "error"}
    assert one["recovered"].notna().all()
    with pytest.raises(ValueError, match="table must come from attention_ladder without metric="):
        head_verdicts(rows)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_under_hooks_of_the_user(kind: str, name: str, shared_model: Any) -> None:
    """Uniform attention and mean outputs by hand in the model with a hook."""
    model, head, keys = shared_model(kind, name), 5, 2
    double = [("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]
    options: dict[str, Any] = {"layers": [1], "heads": [head], "rungs": ["uniform"], "progress": False}
    with model.hooks(fwd_hooks=double):
        table = attention_ladder(model, TOKENS, **options).set_index("rung")["loss"]
    seen: dict[str, Tensor] = {}
    names = ("blocks.1.attn.hook_v", "blocks.1.attn.hook_z")
    logits(model, double + [(each, lambda x, hook, each=each: seen.update({each: x.clone()})) for each in names])
    uniform = seen[names[0]][:, :, keys].cumsum(1) / torch.arange(1, L + 1)[:, None]

    def loss(changed: Tensor | None) -> float:
        def put(z: Tensor, hook: Any) -> Tensor:
            z = z.clone()
            z[:, :, head] = z[:, :, head] if changed is None else changed
            return z

        found = logits(model, [*double, (names[1], put)])
        return float(torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()))

    expected = {"uniform": uniform, "mean_output": seen[names[1]][:, :, head].mean((0, 1)), "untouched": None}
    for rung, changed in expected.items():
        assert table[rung] == pytest.approx(loss(changed), abs=1e-5)
    assert table["untouched"] != pytest.approx(table["uniform"], abs=1e-4)


def test_texts_too_short_for_shares_are_said() -> None:
    """Of two tokens, one is predicted, by a position that sees itself alone."""
    model, tokens = load_demo_model(), demo_tokens(length=2)
    with pytest.warns(UserWarning, match="recovered is NaN in every row, .* the shortest text has 2 tokens: give"):
        table = attention_ladder(model, tokens, layers=0, rungs=["distance"], progress=False)
    assert table["recovered"].isna().all()


SIGNS = torch.tensor([1.0, -1.0])
UNSURE = {
    "loss": (1, None, "the loss by no more than a standard error, .* give more texts, or read recovered_kl"),
    "metric": (
        2,
        lambda logits: logits[:, :, 7].mean(1) * SIGNS,
        "the metric by no more than a standard error, .* texts$",
    ),
    "metric of one text": (
        1,
        lambda logits: logits.new_zeros(1),
        "the metric by no more than rounding, .* more texts$",
    ),
}


@pytest.mark.parametrize(("texts", "metric", "why"), UNSURE.values(), ids=UNSURE)
def test_shares_that_errors_hide_are_said_although_predictions_change(texts: int, metric: Any, why: str) -> None:
    model, tokens = load_demo_model(), demo_tokens(length=32 * texts).view(texts, 32)
    options: dict[str, Any] = {"heads": "L1H3", "rungs": ["uniform"], "controls": [], "progress": False}
    with pytest.warns(UserWarning, match=f"recovered is NaN in every row, because uniform attention changes {why}"):
        table = attention_ladder(model, tokens, metric=metric, **options)
    kl = table.set_index("rung")["kl"]
    assert table["recovered"].isna().all()
    assert kl["uniform"] > 1e-3
