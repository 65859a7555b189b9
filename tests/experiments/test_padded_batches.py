"""Every number of a text in a padded batch is that of the text alone: all experiments, both sides and classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from scipy.linalg import subspace_angles
from support import zoo
from support.lanes import slow
from support.public import public_names
from support.tolerance import rounding
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import experiments as ex
from tl_posdisent.experiments.residual_stream.content_position import TERMS

LENGTHS = [9, 14, 9, 11]
WIDTH = max(LENGTHS)
TEXTS = [zoo.random_tokens(n, batch=1, seed=i) for i, n in enumerate(LENGTHS)]
MODELS = zoo.cases("llama-gqa")
SIDES = ["left", "right"]
Call = Callable[..., Any]


def batch(side: str, texts: list[Tensor] = TEXTS) -> tuple[Tensor, Tensor]:
    """Padded ids and their mask."""
    ends = [(WIDTH - x.shape[1], 0) if side == "left" else (0, WIDTH - x.shape[1]) for x in texts]
    pad = torch.nn.functional.pad
    tokens = torch.cat([pad(x, end) for x, end in zip(texts, ends, strict=True)])
    return tokens, torch.cat([pad(torch.ones_like(x), end) for x, end in zip(texts, ends, strict=True)])


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-4, atol=1e-5)


BY_TEXT: dict[str, Call] = {
    "additivity": tp.additivity,
}
"""One row or more for each text, with its number in ``batch``."""

POOLED: dict[str, Call] = {
    "additivity": lambda *x, **y: tp.additivity(*x, pool=True, **y),
    "controlled_distance": lambda *x, **y: tp.controlled_distance(*x, sinks=1, **y),
    "disentanglement": tp.disentanglement,
    "subspace_patterns": tp.subspace_patterns,
}
"""One table for all texts."""

MEANS: dict[str, Call] = {
    "head_ablation": lambda *x, **y: tp.head_ablation(*x, real_logits, heads=[(0, 1), (1, 3)], **y),
    "head_patching of patterns": lambda model, tokens, **y: tp.head_patching(
        model, others(tokens), tokens, real_logits, activation="pattern", heads=[3], **y
    ),
    "head_patching": lambda model, tokens, **y: tp.head_patching(
        model, others(tokens), tokens, real_logits, heads=[0, 3], **y
    ),
    "position_patching of keys": lambda model, tokens, **y: tp.position_patching(
        model, tokens, torch.arange(tokens.shape[1]) ** 1.1, real_logits, what="key", keys="head", heads=3, **y
    ),
}
"""The mean of a metric of one's own over texts; for that of the loss see ``laws/test_ignored_tokens.py``."""
QUICK = [*MEANS][:2]


def others(tokens: Tensor) -> Tensor:
    """Other texts of the same lengths, with the same padding."""
    return torch.where(tokens > 2, 3 + (tokens * 7) % 58, tokens)


def real_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """A metric of a user's, with NaN exactly at padding, which has the ids 0."""
    assert torch.equal(logits.isnan().all(-1), tokens == 0)
    assert torch.equal(logits.isnan().any(-1), tokens == 0)
    return logits[:, :, 5].square().nanmean(1)


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("name_of", BY_TEXT)
def test_rows_of_a_text(name_of: str, kind: str, name: str, shared_reading: Any) -> None:
    """The rows of each text are those of a table of that text alone, in the order of the batch."""
    model, run = shared_reading(kind, name), BY_TEXT[name_of]
    alone = pd.concat([run(model, text, progress=False).assign(batch=i) for i, text in enumerate(TEXTS)])
    keys = [key for key in ("layer", "distance", "batch", "head") if key in alone]
    expected = alone.sort_values(keys, kind="stable", ignore_index=True)
    for side in SIDES:
        tokens, mask = batch(side)
        found = run(model, tokens, attention_mask=mask, progress=False)
        same(found.drop(columns="r_held_out", errors="ignore"), expected)  # of a text alone there is none


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("name_of", POOLED)
def test_one_padded_text(name_of: str, kind: str, name: str, shared_reading: Any) -> None:
    """Where texts are measured together: a padded text has the numbers of that text."""
    model, run = shared_reading(kind, name), POOLED[name_of]
    expected = run(model, TEXTS[0], progress=False)
    for side in SIDES:
        tokens, mask = batch(side, TEXTS[:1])
        same(run(model, tokens, attention_mask=mask, progress=False), expected)


OTHERS = zoo.cases("gptj", "gpt_oss", "bloom", "gpt2", "lfm2")


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_every_mechanism(kind: str, name: str, shared_reading: Any) -> None:
    """Of windows, sinks, learned positions, biases and other layers' states nothing is left of the padding; what is
    refused for a text alone is refused in the same words."""
    model = shared_reading(kind, name)
    calls: dict[str, Call] = {
        "additivity": lambda *x, **y: tp.additivity(*x, **y).assign(batch=0),
        "head_ablation": lambda *x, **y: tp.head_ablation(*x, heads=[0], **y),
        "component_patching": lambda model, tokens, **y: tp.component_patching(
            model, tokens, "key", source=others(tokens), heads=[0], **y
        ),
        "controlled_distance": tp.controlled_distance,
    }
    for tool, call in calls.items():
        alone, refusal = None, ""
        try:
            alone = call(model, TEXTS[0], progress=False)
        except ValueError as error:
            refusal = str(error)
        for side in SIDES:
            tokens, mask = batch(side, TEXTS[:1])
            if alone is None:
                with pytest.raises(ValueError, match=re.escape(refusal)):
                    call(model, tokens, attention_mask=mask, progress=False)
                continue
            try:
                same(call(model, tokens, attention_mask=mask, progress=False), alone)
            except AssertionError as error:
                raise AssertionError(f"{tool}, {side}: {error}") from error


def test_pooled_fit_of_unequal_lengths(shared_model: Any) -> None:
    """As ``fit_additive`` of all scores with a mask for each text."""
    model = shared_model("bridge", "llama-gqa")
    tokens, mask = batch("right")
    found = tp.additivity(model, tokens, attention_mask=mask, pool=True, layers=1, progress=False)
    scores, inside = torch.zeros(4, 8, WIDTH, WIDTH), torch.zeros(4, 1, WIDTH, WIDTH, dtype=torch.bool)
    for i, text in enumerate(TEXTS):
        n = text.shape[1]
        (layer,) = tp.capture(model, text, layers=[1])
        scores[i, :, :n, :n], inside[i, :, :n, :n] = layer.scores[0], torch.ones(n, n).tril().bool()
    expected = tp.fit_additive(scores, mask=inside, pool=True).to_frame()
    same(found[[*expected.columns]], expected)


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("name_of", [*QUICK, *slow(x for x in MEANS if x not in QUICK)])
def test_metrics_of_ones_own(name_of: str, kind: str, name: str, shared_reading: Any) -> None:
    model, run = shared_reading(kind, name), MEANS[name_of]
    alone = [run(model, text, progress=False) for text in TEXTS]

    def mean(names: list[str]) -> pd.DataFrame:
        return sum(table[names] for table in alone) / len(alone)  # type: ignore

    for side in SIDES:
        tokens, mask = batch(side)
        found = run(model, tokens, attention_mask=mask, progress=False)
        names = [x for x in found if x not in ("effect", "layer", "head")]
        same(found[names], mean(names))
        if "baseline" in found and "source" not in found:
            same(found[["effect"]], mean(["effect"]))


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("what", ["order", "index", "feature"])
def test_perturbed_batches_run_with_their_mask(what: Any, side: str, kind: str, name: str, shared_reading: Any) -> None:
    """Tokens, hooks and moved places of each text are those of the text alone."""
    reading = shared_reading(kind, name)
    model = reading.model
    tokens, mask = batch(side)
    whole = tp.experiments.perturb(reading, tokens, what, 0.5, attention_mask=mask)
    assert torch.equal(whole.attention_mask, mask.bool())
    with torch.no_grad(), model.hooks(fwd_hooks=whole.hooks):
        logits = model(whole.tokens, attention_mask=mask)
    for row, text in enumerate(TEXTS):
        alone = tp.experiments.perturb(reading, text, what, 0.5)
        with torch.no_grad(), model.hooks(fwd_hooks=alone.hooks):
            expected = model(alone.tokens)[0]
        real = mask[row].bool()
        assert torch.equal(whole.moved[row, real], alone.moved[0])
        assert torch.equal(whole.tokens[row, real], alone.tokens[0])
        assert torch.allclose(logits[row, real], expected, atol=2e-4)


@pytest.mark.parametrize("side", SIDES)
def test_length_generalization(side: str, shared_reading: Any) -> None:
    """As on the texts cut to one length; a text that is too short is refused."""
    model = shared_reading("bridge", "llama-gqa")
    tokens, mask = batch(side)
    found = tp.length_generalization(model, tokens, [0, 4, 8], attention_mask=mask, progress=False)
    cut = torch.cat([text[:, :9] for text in TEXTS])
    same(found, tp.length_generalization(model, cut, [0, 4, 8], progress=False))
    with pytest.raises(ValueError, match="lengths must lie within the text of 9 tokens"):
        tp.length_generalization(model, tokens, [0, 4, 12], attention_mask=mask, progress=False)


@pytest.mark.parametrize("side", SIDES)
def test_texts_of_equal_length(side: str, shared_reading: Any) -> None:
    """What averages over texts at each position runs padded texts of one length as texts without padding."""
    model = shared_reading("bridge", "llama-gqa")
    equal = torch.cat([TEXTS[0], TEXTS[2]])
    tokens, mask = batch(side, [TEXTS[0], TEXTS[2]])
    for function, table in (
        (tp.experiments.positional_subspace, lambda space: pd.DataFrame(space.variances[None].numpy())),
        (tp.experiments.content_position_terms, lambda terms: terms.to_frame()),
        (ex.rope_hadamard, lambda form: form.to_frame()),
    ):
        same(table(function(model, tokens, -1, attention_mask=mask)), table(function(model, equal, 1)))
    whole, whole_mask = batch(side)
    with pytest.raises(ValueError, match="tokens must be texts of equal length for rope_hadamard"):
        ex.rope_hadamard(model, whole, 1, attention_mask=whole_mask)  # one kernel for all, which may change with length
    for function in (ex.positional_subspace, ex.content_position_terms):
        with pytest.raises(
            ValueError, match=r"at least two texts at every position .* positions 11 to 13: cut it to 11"
        ):
            function(model, whole, 1, attention_mask=whole_mask)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("grand_mean", ["content", "bias"])
def test_means_at_positions_are_over_the_texts_that_reach_them(grand_mean: Any, side: str, shared_model: Any) -> None:
    """Against loops over tokens; the terms of each text add up to its scores alone."""
    model = shared_model("bridge", "llama-gqa")
    texts = [*TEXTS, (TEXTS[1] * 5) % 58 + 3]
    tokens, mask = batch(side, texts)
    found = ex.content_position_terms(model, tokens, 1, attention_mask=mask, grand_mean=grand_mean)
    caches = [model.run_with_cache(text)[1] for text in texts]
    streams = [cache["resid_pre", 1][0].double() for cache in caches]
    at = [torch.stack([x[i] for x in streams if i < len(x)]) for i in range(WIDTH)]
    mean = torch.cat(at).mean(0)
    position = torch.stack([x.mean(0) for x in at]) - mean
    # A batch and a text alone are two float32 computations of the stream, in a block of eight steps.
    torch.testing.assert_close(found.position, position, rtol=0, atol=rounding(torch.cat(at), 8))
    total = sum(found.term(name) for name in TERMS)
    for row, (cache, n) in enumerate(zip(caches, [*LENGTHS, WIDTH], strict=True)):
        inside = torch.zeros(WIDTH, WIDTH, dtype=torch.bool)
        inside[:n, :n] = torch.ones(n, n).tril().bool()
        assert torch.equal(found.mask[row], inside)
        expected = cache["attn_scores", 1][0].double()[:, inside[:n, :n]]
        atol = rounding(expected, 8 + 3)  # and queries, keys and their products
        torch.testing.assert_close(total[row][:, inside], expected, rtol=0, atol=atol)
        assert not total[row][:, ~inside].any()
    assert found.to_frame().groupby("head")["share"].sum().tolist() == pytest.approx([1] * found.query.shape[3])

    space = ex.positional_subspace(model, tokens, 1, attention_mask=mask)
    between = sum(len(x) * p.square().sum() for x, p in zip(at, position, strict=True))
    within = sum((x - x.mean(0)).square().sum() for x in at)
    n = sum(len(x) for x in streams)
    close = rounding(1.0, 8)
    assert space.share == pytest.approx(float(between / (between + within)), rel=close)
    assert space.variances.sum() == pytest.approx(float(between / n), rel=close)
    noise = within / (n - WIDTH) * (WIDTH - 1) / (between + within)
    assert space.noise == pytest.approx(float(noise), rel=close)
    assert subspace_angles(space.basis.numpy(), position.T.numpy()).max() < 1e-3


def test_every_experiment_takes_a_mask() -> None:
    """All public experiments on tokens; their laws are above. Some take two sets of texts, each with its mask."""
    of_two = (tp.attention_ladder, tp.where_or_what, tp.describe_head, tp.compare_heads)
    for name, function in public_names().items():
        if inspect.isfunction(function) and function.__module__.startswith("tl_posdisent.experiments"):
            named = inspect.signature(function).parameters
            assert "attention_mask" in named or "tokens" not in named or function in of_two, name
