"""The headline measurement, against least squares written out, on a trained model and by chance."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import additivity, dummy_distance
from tl_posdisent.hooks import applied
from tl_posdisent.models import read_model

TOKENS = zoo.random_tokens(24)
COLUMNS = ["batch", "layer", "head", "r2", "r2_adjusted", "r_no_distance", "r_held_out", "share_query"]
COLUMNS += ["r", "share_distance", "share_key"]


def table_of(model: Any, tokens: Tensor = TOKENS, **more: Any) -> pd.DataFrame:
    return additivity(model, tokens, progress=False, **more)


def cached_scores(model: Any, tokens: Tensor = TOKENS) -> list[Tensor]:
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        cache = model.run_with_cache(tokens, names_filter=names)[1]
    return [cache[name] for name in names]


def by_least_squares(scores: Tensor, cells: Tensor) -> dict[str, float]:
    """One score matrix, with a design matrix of zeros and ones, by numpy."""
    i, j = (x.numpy() for x in cells.nonzero(as_tuple=True))
    length = len(cells)
    axes = {"share_distance": i - j + length - 1, "share_query": i, "share_key": j}
    y = scores.double().numpy()[i, j]

    def explained(*columns: np.ndarray) -> float:
        design = np.hstack([np.eye(2 * length)[column] for column in columns])
        fitted = design @ np.linalg.lstsq(design, y, rcond=None)[0]
        return float(1 - np.sum((y - fitted) ** 2) / np.sum((y - y.mean()) ** 2))

    design = np.hstack([np.ones((len(y), 1)), *(np.eye(2 * length)[column] for column in axes.values())])
    r2 = explained(*axes.values())
    spare = len(y) - np.linalg.matrix_rank(design)
    alone = explained(axes["share_query"], axes["share_key"]) ** 0.5
    out = {"r": r2**0.5, "r_no_distance": alone, "r2": r2, "r2_adjusted": 1 - (1 - r2) * (len(y) - 1) / spare}
    return out | {name: explained(column) for name, column in axes.items()}


# --- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2", "bloom", "gemma2", "gpt_oss", "deepseek_v3"))
def test_every_number_by_least_squares(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table, scores = table_of(model), cached_scores(model)
    assert table.columns.tolist() == COLUMNS
    assert len(table) == 2 * model.cfg.n_layers * 8
    for spec in read_model(model).specs():
        for batch, head in ((0, 0), (1, 5)):
            row = table.query(f"batch == {batch} and layer == {spec.layer} and head == {head}").iloc[0]
            expected = by_least_squares(scores[spec.layer][batch, head], spec.mask(24))
            for column, value in expected.items():
                assert row[column] == pytest.approx(value, abs=1e-6), column


def held_out(scores: list[np.ndarray], cells: list[np.ndarray], text: int) -> float:
    """r of one text with the profile of all others, which have queries and keys of their own, by numpy."""
    size = max(len(x) for x in cells)
    designs = []
    for n, (i, j) in enumerate(np.nonzero(x) for x in cells):
        distance, own = np.eye(2 * size)[i - j + size], np.zeros((len(i), len(cells), 2 * size))
        own[np.arange(len(i)), n, i] = own[np.arange(len(i)), n, size + j] = 1
        designs.append(np.hstack([distance, own.reshape(len(i), -1)]))
    y = [x[c] for x, c in zip(scores, cells, strict=True)]
    others = [n for n in range(len(y)) if n != text]
    fit = np.linalg.lstsq(np.vstack([designs[n] for n in others]), np.hstack([y[n] for n in others]), rcond=None)[0]
    left = y[text] - designs[text][:, : 2 * size] @ fit[: 2 * size]
    own = designs[text][:, 2 * size :]
    rest = left - own @ np.linalg.lstsq(own, left, rcond=None)[0]
    return float(np.sqrt(max(0.0, 1 - np.sum(rest**2) / np.sum((y[text] - y[text].mean()) ** 2))))


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("lengths", [(24, 24, 24), (24, 17, 24, 9), (24, 17), (9, 24, 17)])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_profile_of_other_texts(kind: str, name: str, lengths: tuple[int, ...], sinks: int, shared_model: Any) -> None:
    model, generator = shared_model(kind, name), torch.Generator().manual_seed(5)
    ids = torch.randint(3, 60, (len(lengths), 24), generator=generator)
    real = torch.arange(24) < torch.tensor(lengths)[:, None]
    table = table_of(model, ids, attention_mask=real.long(), layers=[1], sinks=sinks)
    table = table.set_index(["batch", "head"])["r_held_out"]
    (spec,), head = read_model(model).specs([1]), 5
    scores = [
        tp.capture(model, row[None, :n], layers=[1])[0].scores[0, head].double().numpy()
        for row, n in zip(ids, lengths, strict=True)
    ]
    for text, length in enumerate(lengths):
        cells = [spec.mask(n).numpy() & (np.arange(n) >= sinks) for n in lengths]
        others = {d for n, x in enumerate(cells) if n != text for d in np.subtract(*np.nonzero(x)).tolist()}
        cells[text] = cells[text] & np.isin(np.subtract.outer(range(length), range(length)), list(others))
        assert table[text, head] == pytest.approx(held_out(scores, cells, text), abs=1e-6)


def test_one_text_has_no_others() -> None:
    assert "r_held_out" not in table_of(zoo.load("hooked", "llama-gqa"), TOKENS[:1])


def test_texts_too_short_for_a_fit_have_no_r_of_its_parts_either() -> None:
    """Three tokens: six scores and as many coefficients, whatever the profile."""
    table = table_of(zoo.load("hooked", "llama-gqa"), TOKENS[:, :3])
    assert table[["r", "r_no_distance", "r_held_out"]].isna().all(axis=None)


def test_texts_that_are_the_same_are_noticed() -> None:
    """Each has the profile of the other, which is its own."""
    model = zoo.load("hooked", "llama-gqa")
    with pytest.warns(UserWarning, match="some texts are the same, so r_held_out of these"):
        table = table_of(model, TOKENS[[0, 1, 0]])
    single = table_of(model, TOKENS[[0, 0]], pool=True)
    assert "r_held_out" not in single
    assert len(table) == 3 * len(single)


def test_models_that_show_only_their_pattern(shared_model: Any) -> None:
    """A bridge recomputes their scores, of which the pattern is the softmax."""
    model = shared_model("bridge", "gptj")
    hook = "blocks.1.attn.hook_pattern"
    with torch.no_grad():
        pattern = model.run_with_cache(TOKENS, names_filter=hook)[1][hook]
    (layer,) = tp.capture(model, TOKENS, layers=[1])
    inside = layer.spec.mask(24)
    found = layer.scores.masked_fill(~inside, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, pattern, rtol=1e-4, atol=1e-5)
    row = table_of(model, layers=[1]).query("batch == 0 and head == 7").iloc[0]
    assert row["r2"] == pytest.approx(by_least_squares(layer.scores[0, 7], inside)["r2"], abs=1e-6)


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_a_mask_narrows_that_of_the_layer(kind: str, name: str, shared_model: Any) -> None:
    """Where a layer has a window, cells outside hold no scores, whatever the user's mask says."""
    model = shared_model(kind, name)
    late = torch.ones(24, 24, dtype=torch.bool)
    late[:, :4] = False
    late[:4] = False
    table, scores = table_of(model, mask=late), cached_scores(model)
    for spec in read_model(model).specs():
        expected = by_least_squares(scores[spec.layer][0, 2], late & spec.mask(24))
        row = table.query(f"batch == 0 and layer == {spec.layer} and head == 2").iloc[0]
        assert row["r"] == pytest.approx(expected["r"], abs=1e-6)
    pd.testing.assert_frame_equal(table_of(model, mask=torch.ones(24, 24, dtype=torch.bool)), table_of(model))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_pooling_shares_the_distances(kind: str, name: str, shared_model: Any) -> None:
    """Texts that are the same have the same profile: pooled they fit as well as alone. Others do not."""
    model = shared_model(kind, name)
    alone, different = table_of(model), table_of(model, pool=True)
    assert "batch" not in different.columns
    assert len(different) == 16
    twice = table_of(model, TOKENS[[0, 0]], pool=True)
    np.testing.assert_allclose(twice["r"], alone.query("batch == 0")["r"], rtol=0, atol=1e-6)
    assert (different["r2"].to_numpy() <= alone.groupby(["layer", "head"])["r2"].max().to_numpy() + 1e-9).all()
    assert different["r"].mean() < alone["r"].mean()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_interventions_act_on_what_is_fitted(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = dummy_distance(model, 4, layers=[0])
    with applied(model, hooks):
        table, scores = table_of(model, layers=[0]), cached_scores(model)[0]
    (spec,) = read_model(model).specs([0])
    expected = by_least_squares(scores[0, 3], spec.mask(24))
    row = table.query("batch == 0 and head == 3").iloc[0]
    assert row["r"] == pytest.approx(expected["r"], abs=1e-6)
    assert not np.allclose(table["r"], table_of(model, layers=[0])["r"], atol=1e-2)


def test_bfloat16_is_widened_layer_by_layer() -> None:
    """Scores of a bfloat16 model are fitted in float64, as are its queries and keys: what remains is their rounding."""
    model, tokens = zoo.bridge("llama-gqa").to(torch.bfloat16), zoo.random_tokens(64, 1)
    table = tp.additivity(model, tokens, progress=False)
    controlled = tp.controlled_distance(model, tokens, progress=False)
    for layer in tp.capture(model, tokens):
        assert layer.q_rot.dtype == layer.scores.dtype == torch.bfloat16
        own = table[table["layer"] == layer.layer]["r"]
        wide = tp.fit_additive(layer.scores.double())
        assert own.tolist() == pytest.approx(wide.r[0].tolist(), abs=1e-12)  # not one sum was made in 16 bits
        scale = layer.spec.require_scale()
        linear, float32 = (
            tp.fit_additive_qk(q, k, scale=scale).r
            for q, k in ((layer.q_rot, layer.k_rot), (layer.q_rot.float(), layer.k_rot.float()))
        )
        assert torch.equal(linear, float32)
        assert own.tolist() == pytest.approx(linear[0].tolist(), abs=0.01)  # scores that were rounded to 8 bits
        shares = tp.rope.decompose(
            tp.rope.Moments.from_qk(layer.q.double(), layer.k.double(), layer.spec.rotary), range(64), scale=scale
        )
        of_layer = controlled[controlled["layer"] == layer.layer]["r_three_axis"]
        assert of_layer.tolist() == pytest.approx(shares.to_frame()["r_three_axis"].tolist(), abs=1e-9)


@pytest.mark.parametrize("length", [2, 3])
def test_texts_too_short_for_r_are_said(length: int, shared_model: Any) -> None:
    """With as many coefficients as pairs, any scores are a sum; 4 tokens are enough."""
    model = shared_model("bridge", "llama-gqa")
    told = rf"tokens: r is NaN in 32 of 32 rows, .* the shortest text has {length} tokens. Give longer texts: 4 tokens"
    with pytest.warns(UserWarning, match=told):
        assert table_of(model, TOKENS[:, :length])["r"].isna().all()
    with pytest.warns(UserWarning, match="r is NaN in 16 of 16 rows"):
        tp.disentanglement(model, TOKENS[:1, :length], progress=False)
    with pytest.warns(UserWarning, match="r is NaN in 16 of 16 rows"):
        table_of(model, TOKENS[:1, : length + 2], sinks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table_of(model, TOKENS[:, :4])["r"].notna().all()
        assert table_of(model, TOKENS[:, :6], sinks=2)["r"].notna().all()
