"""What goes in: every dtype and layout, and whatever stands outside the mask."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
import pytest
import torch
from support.dense import allowed
from support.masks import FIELDS, every_option, noise
from torch import Tensor

from tl_posdisent import AdditiveFit, demo_tokens, fit_additive, load_demo_model
from tl_posdisent.utils.errors import ArgumentError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def cells_of(options: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    mask = options.get("mask")
    return (allowed(*shape[-2:], **options) if mask is None else mask).expand(shape)


def assert_equal(found: AdditiveFit, expected: AdditiveFit) -> None:
    """To rounding: CPUs add what lies elsewhere in another order."""
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-12, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_option
def test_the_fit_is_that_of_the_scores_in_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    scores = noise(2, 3, 9, 9, dtype=dtype)
    fit = fit_additive(scores, **options)
    assert_equal(fit, fit_additive(scores.double(), **options))
    for name in FIELDS:
        whole = name in ("distances", "n_cells", "n_parameters")
        assert getattr(fit, name).dtype == (torch.int64 if whole else torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_option
def test_cells_outside_the_mask_never_matter(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever they hold: numbers that are none, or finite ones, in any mixture."""
    scores = noise(2, 3, 9, 9, dtype=dtype)
    outside = ~cells_of(options, scores.shape)
    largest, expected = torch.finfo(dtype).max, fit_additive(scores, **options)
    for fillers in ([-math.inf, math.inf, math.nan], [-largest, largest, -3.4e38, 3.4e38, 0.0], [largest], [-math.inf]):
        drawn = torch.tensor(fillers, dtype=torch.float64)[torch.randint(len(fillers), scores.shape)].to(dtype)
        filled = torch.where(outside, drawn, scores)
        fit = fit_additive(filled, **options)
        assert_equal(fit, expected)
        torch.testing.assert_close(fit.residual(filled), fit.residual(scores), rtol=0, atol=0)
        assert bool((fit.residual(filled)[outside] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cells_inside_the_mask_must_be_scores(dtype: torch.dtype) -> None:
    limits, where = torch.finfo(dtype), (1, 2, 8, 3)
    for value in (math.nan, math.inf, -math.inf, limits.min, limits.max):
        scores = noise(2, 3, 9, 9, dtype=dtype)
        scores[where] = value
        shown = re.escape(f"got {scores[where].item():g} at index {where} (query 8, key 3) and 0 more")
        with pytest.raises(ValueError, match=f"scores must be finite inside the mask, {shown}"):
            fit_additive(scores)


@pytest.mark.parametrize("value", [6e4, -6e4])
def test_large_half_precision_scores_are_no_masking_values(value: float) -> None:
    scores = torch.full((20, 20), value, dtype=torch.float16)
    scores[::2] = 0
    assert fit_additive(scores).share_query.item() == pytest.approx(1.0)


def layouts() -> dict[str, Tensor]:
    x = noise(2, 3, 9, 9)
    wide = torch.zeros(2, 3, 12, 20)
    wide[..., 2:11, 1:19:2] = x
    return {
        "strided": wide[..., 2:11, 1:19:2],
        "transposed": x.mT.contiguous().mT,
        "heads-last": x.movedim(1, -1).contiguous().movedim(-1, 1),
        "requires-grad": x.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(x.clone()),
        "computed": x.clone().requires_grad_() * 1.0,
    }


@pytest.mark.parametrize("name", layouts())
def test_layout_does_not_matter_and_the_input_is_left_alone(name: str) -> None:
    scores = layouts()[name]
    before, version = scores.detach().clone(), scores._version
    fit = fit_additive(scores)
    assert_equal(fit, fit_additive(before.contiguous()))
    assert torch.equal(scores, before)
    assert scores._version == version
    assert not any(getattr(fit, field).requires_grad for field in FIELDS)
    assert not fit.residual(scores).requires_grad


def test_scores_of_several_layers_are_fitted_as_each_alone() -> None:
    """A whole cache, or a list of layers: tables have columns ``layer`` and ``head``; texts are pooled as ever."""
    scores = {layer: torch.randn(3, 2, 9, 9, dtype=torch.float64) for layer in (4, 1)}
    cache = {f"blocks.{layer}.attn.hook_attn_scores": x for layer, x in scores.items()} | {"blocks.1.hook_z": None}
    for pool in (False, True):
        fit = fit_additive(cache, pool=pool)
        assert fit.layers == (1, 4)
        table = fit.to_frame()
        assert list(table.columns[: 3 - pool]) == ["batch", "layer", "head"][pool:]
        for layer, alone in scores.items():
            expected = fit_additive(alone, pool=pool).to_frame()
            got = table[table["layer"] == layer].drop(columns="layer").reset_index(drop=True)
            pd.testing.assert_frame_equal(got, expected)
    listed = fit_additive([scores[1], scores[4]])
    assert listed.to_frame()["layer"].unique().tolist() == [0, 1]
    assert listed.to_frame("distance").columns.tolist() == ["batch", "layer", "head", "distance", "value"]
    torch.testing.assert_close(listed.r, fit_additive(cache).r)
    one_text = fit_additive([x[0] for x in scores.values()]).to_frame()
    assert list(one_text.columns[:2]) == ["layer", "head"]


@pytest.mark.parametrize("pool", [False, True])
def test_methods_take_what_the_fit_took(pool: bool) -> None:
    """A tensor, a list or a cache give the same residual and the same widget; other layers are refused."""
    model, tokens = load_demo_model(), demo_tokens(length=20).reshape(2, 10)
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_attn_scores"))
    words, last = [str(n) for n in range(10)], model.cfg.n_layers - 1
    listed = list(cache.values())
    stacked = torch.stack(listed, 1)
    for given in (cache, dict(cache.items()), listed, tuple(listed)):
        fit = fit_additive(given, pool=pool)
        torch.testing.assert_close(fit.residual(given), fit.residual(stacked), rtol=0, atol=0)
        for component in ("scores", "residual"):
            shown = fit.show(words, component, scores=given, layer=last)
            if not pool:
                alone = fit_additive(listed[last]).show(words, component, scores=listed[last], layer=last)
                found, expected = (re.sub(r"circuits-vis-[\w-]+", "id", str(x)) for x in (shown, alone))
                assert found == expected
    fewer = {name: x for name, x in cache.items() if "blocks.0." not in name}
    moved = {f"blocks.{n + 1}.attn.hook_attn_scores": x for n, x in enumerate(listed)}
    for wrong in (fewer, moved, listed[1:], listed[0], "scores", None):
        for refused in (fit.residual, lambda x: fit.show(words, "scores", scores=x, layer=last)):
            with pytest.raises(ArgumentError, match="scores must "):
                refused(wrong)
    with pytest.raises(ArgumentError, match=r"must have the fitted shape \(2, 8, 10, 10\), got .* of layers"):
        fit_additive(listed[0]).residual(cache)


def test_layers_of_one_text_are_not_pooled() -> None:
    """Their first axis is that of the heads; a list of texts is stacked by its user."""
    each = [torch.randn(2, 9, 9, dtype=torch.float64) for _ in range(3)]
    with pytest.raises(
        ArgumentError,
        match=r"pool must be False for layers without an axis of texts, got scores of shape \(2, 9, 9\) per layer: "
        r"pass \(text, head, query, key\) for each, as a cache with remove_batch_dim=False has, or torch.stack",
    ):
        fit_additive(each, pool=True)
    pooled = fit_additive([x[None] for x in each], pool=True)  # one text: nothing to pool
    torch.testing.assert_close(pooled.r, fit_additive(each).r)


def test_a_mask_of_several_layers_has_their_axis() -> None:
    """A mask of texts and heads alone would be read as one of layers and heads."""
    scores = torch.randn(2, 2, 3, 9, 9, dtype=torch.float64)  # text, layer, head, query, key
    mask = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, ..., :3] = False  # the second text is padded on the left
    with pytest.raises(ArgumentError, match=r"mask must have shape .* all axes of the scores .* got \(2, 1, 9, 9\)"):
        fit_additive([*scores.transpose(0, 1)], mask=mask)
    fit = fit_additive([*scores.transpose(0, 1)], mask=mask[:, None])
    for text in range(2):
        alone = fit_additive(scores[text], mask=mask[text, 0])
        torch.testing.assert_close(fit.r[text], alone.r)
