"""Tables of a sweep, merged: what was measured in different ways is never added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tl_posdisent import additivity, controlled_distance, demo_tokens, load_demo_model, read_model
from tl_posdisent.sweeps import (
    Text,
    jobs,
    marginals_by_layer,
    merge_additivity,
    merge_controlled_distance,
    merge_moments,
    moments_by_layer,
    sweep,
)

pytestmark = pytest.mark.slow  # a sweep is made first
TEXTS = Text.of("demo", length=64, count=2)
LAST: dict[str, Any] = {"layers": [4]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Moments of two texts with two values of an argument, and in two precisions."""
    asked = [("moments_by_layer", {**LAST, "sinks": sinks}) for sinks in (0, 32)]
    todo = jobs("demo", asked, TEXTS.split(2)) + jobs("demo", asked[:1], TEXTS.split(2), dtype="float64")
    return sweep(todo, out=tmp_path_factory.mktemp("sweep"), progress=False)


def test_arguments_and_precision_are_columns(swept: pd.DataFrame) -> None:
    settings = swept[["arguments", "layers", "sinks", "backend", "dtype"]].drop_duplicates()
    assert settings.values.tolist() == [
        ['{"layers":[4],"sinks":0}', "[4]", 0, "auto", "float32"],
        ['{"layers":[4],"sinks":32}', "[4]", 32, "auto", "float32"],
        ['{"layers":[4],"sinks":0}', "[4]", 0, "auto", "float64"],
    ]


def test_each_setting_is_merged_by_itself(swept: pd.DataFrame) -> None:
    """Each equals the direct call with it; all of them together are refused where one result is asked for."""
    merged = merge_controlled_distance(swept)
    assert {"arguments", "sinks", "dtype"} <= set(merged)
    model = load_demo_model()
    for (sinks, dtype), rows in merged.groupby(["sinks", "dtype"]):
        direct = controlled_distance(model, TEXTS.tokens(model), sinks=sinks, **LAST, progress=False)
        tight = 1e-9 if dtype == "float32" else 1e-4
        shown = rows[direct.columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(shown, direct, check_exact=False, rtol=tight, atol=tight)
    assert len(merged) == 3 * 8
    with pytest.raises(
        ValueError, match="of one model, checkpoint and setting, got 3 that differ in arguments, dtype, sinks"
    ):
        merge_moments(swept)
    one = swept[(swept["sinks"] == 32) & (swept["dtype"] == "float32")]
    assert merge_moments(one)[4].query.count == 2 * 32
    assert "sinks" not in merge_controlled_distance(one)


def test_tables_of_direct_calls_know_their_sinks() -> None:
    """Two calls on one text of 64 tokens are not 96 queries of it."""
    model, tokens = load_demo_model(), demo_tokens(length=64)
    table = pd.concat([moments_by_layer(model, tokens, sinks=n, **LAST, progress=False) for n in (0, 32)])
    with pytest.raises(ValueError, match="that differ in sinks"):
        merge_moments(table)
    assert merge_controlled_distance(table)["sinks"].tolist() == [0] * 8 + [32] * 8


def test_marginals_are_pooled_within_their_arguments(tmp_path: Path) -> None:
    asked = [("marginals_by_layer", {"layers": layers}) for layers in ([4], [3, 4])]
    table = sweep(jobs("demo", asked, TEXTS.split(2)), out=tmp_path, progress=False)
    model = load_demo_model()
    for arguments, rows in merge_additivity(table).groupby("arguments"):
        layers = [4] if arguments == '{"layers":[4]}' else [3, 4]
        direct = additivity(model, TEXTS.tokens(model), layers=layers, pool=True, progress=False)
        shown = rows[direct.columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(shown, direct, check_exact=False, rtol=1e-9, atol=1e-9)


def test_a_job_that_is_there_twice_is_refused(swept: pd.DataFrame, tmp_path: Path) -> None:
    twice = pd.concat([swept, swept.iloc[:12]])
    for merge in (merge_moments, merge_controlled_distance):
        with pytest.raises(ValueError, match="table must have each job once, got job"):
            merge(twice)
    table = sweep(jobs("demo", ("marginals_by_layer", LAST), TEXTS), out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="table must have each job once, got job"):
        merge_additivity(pd.concat([table, table]))


def test_pooled_fits_of_texts_of_several_lengths_are_refused() -> None:
    model = load_demo_model()
    parts = [marginals_by_layer(model, demo_tokens(length=n), layers=[0], progress=False) for n in (30, 40)]
    with pytest.raises(ValueError, match="texts must have one length in layer 0 to be merged, got 30, 40"):
        merge_additivity(pd.concat(parts))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_are_the_texts(side: str) -> None:
    """Each row of a padded batch is that of its text alone, or adds up to it; a reading stands for the model."""
    model, lengths = read_model(load_demo_model()), (40, 25)
    texts = [demo_tokens(length=n) for n in lengths]
    pads = [(40 - n, 0) if side == "left" else (0, 40 - n) for n in lengths]
    tokens = torch.cat([torch.nn.functional.pad(x, pad) for x, pad in zip(texts, pads, strict=True)])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(x), pad) for x, pad in zip(texts, pads, strict=True)])
    options: dict[str, Any] = {**LAST, "progress": False}
    rows = marginals_by_layer(model, tokens, attention_mask=mask, **options)
    for n, text in enumerate(texts):
        alone = marginals_by_layer(model, text, **options).drop(columns="batch")
        shown = rows[rows["batch"] == n].drop(columns="batch").reset_index(drop=True)
        pd.testing.assert_frame_equal(shown, alone, check_exact=False, rtol=1e-6, atol=1e-6)
    together = merge_controlled_distance(moments_by_layer(model, tokens, attention_mask=mask, **options))
    apart = pd.concat([moments_by_layer(model, text, **options) for text in texts])
    apart = merge_controlled_distance(apart, range(40))
    pd.testing.assert_frame_equal(together, apart, check_exact=False, rtol=1e-6, atol=1e-6)
    for measure in (marginals_by_layer, moments_by_layer):
        with pytest.raises(ValueError, match="attention_mask"):
            measure(model, tokens, **options)
