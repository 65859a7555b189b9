"""Parts of scores moved between runs: own parts change nothing, all parts are the scores, a softmax ignores queries."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.intervention_cases import FEW, TOKENS, UNORDERED, close, every_way, logits, patch_scores
from torch import Tensor

from tl_posdisent import capture, component_patching, fit_additive, position_patching
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.models import read_model
from tl_posdisent.models.capture import listen_scores

pytestmark = pytest.mark.usefixtures("unchecked")  # doctests run with the checks of annotations
OTHER = zoo.random_tokens(seed=1)
PARTS = ["mean", "distance", "query", "key", "residual"]
HEAD = 5


def scores(model: Any, layer: int, tokens: Tensor = TOKENS) -> Tensor:
    held: dict[str, Tensor] = {}
    logits(model, listen_scores(read_model(model).specs([layer])[0], None, held), tokens)
    return held["scores"]


def table(model: Any, component: Any, **options: Any) -> pd.DataFrame:
    return component_patching(model, TOKENS, component, progress=False, **options)


@every_way
def test_scores_are_those_of_capture(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for captured in capture(model, TOKENS):
        inside = captured.spec.mask(12)
        close(scores(model, captured.layer)[..., inside].float(), captured.scores[..., inside], 1e-5)


@every_way
def test_own_parts_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, own = logits(model, []), scores(model, 1)
    for component in (*PARTS, PARTS):
        close(logits(model, patch_scores(model, 1, own, component)), plain)


@pytest.mark.parametrize(("kind", "name"), [case for case in FEW if case.values != ("bridge", "gptj")])
def test_the_part_that_was_moved_and_no_other_is_the_other_run_s(kind: str, name: str, shared_model: Any) -> None:
    """By fitting the scores that come out: components add up, so each can be exchanged by itself."""
    model = shared_model(kind, name)
    spec, theirs, own = read_model(model).specs([0])[0], scores(model, 0, OTHER), scores(model, 0)
    mask = spec.mask(12)
    before, after = (fit_additive(x.double(), mask=mask) for x in (own, theirs))
    for moved in (["distance"], ["key"], ["query", "residual"], ["mean", "key"]):
        held: dict[str, Tensor] = {}
        logits(model, patch_scores(model, 0, theirs, moved, heads=[1, HEAD]) + listen_scores(spec, None, held))
        now = fit_additive(held["scores"].double(), mask=mask)
        for part in ("distance", "query", "key"):
            for head in range(8):
                source = after if part in moved and head in (1, HEAD) else before
                close(getattr(now, part)[:, head], getattr(source, part)[:, head], 1e-5)
        source = after if "mean" in moved else before
        close(now.intercept[:, HEAD], source.intercept[:, HEAD], 1e-5)
        source, x = (after, theirs) if "residual" in moved else (before, own)
        left, expected = held["scores"] - now.fitted(), x - source.fitted()
        close(left[:, HEAD][..., mask].float(), expected[:, HEAD][..., mask].float(), 1e-5)


@every_way
def test_all_parts_of_a_lie_are_its_vectors(kind: str, name: str, shared_model: Any) -> None:
    """A head's scores at other positions, moved as scores or as rotated queries and keys, do the same."""
    model = shared_model(kind, name)
    options = {"layers": [1], "heads": [HEAD]}
    as_scores = table(model, PARTS, source_positions=UNORDERED, **options)
    as_vectors = position_patching(model, TOKENS, UNORDERED, direction="noise", keys="head", progress=False, **options)
    close(torch.tensor(as_scores["value"]), torch.tensor(as_vectors["value"]), 1e-5)
    assert as_scores["source"][0] == pytest.approx(as_vectors["corrupted"][0], abs=1e-6)
    assert as_scores["effect"][0] == pytest.approx(1 - as_vectors["effect"][0], abs=1e-3)
    assert abs(as_scores["effect"][0]) > 1e-4


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_table_is_a_loop_over_hooks(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    rows = table(model, ["distance", "key"], source=OTHER, layers=[1, 0], heads=[HEAD, 2]).to_dict("records")
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 2), (0, HEAD), (1, 2), (1, HEAD)]
    clean, corrupted = (next_token_loss(logits(model, [], x), TOKENS).mean() for x in (OTHER, TOKENS))
    for row in rows:
        theirs = scores(model, row["layer"], OTHER)
        hooks = patch_scores(model, row["layer"], theirs, ["distance", "key"], heads=[row["head"]])
        value = next_token_loss(logits(model, hooks), TOKENS).mean()
        assert row["value"] == pytest.approx(value.item(), abs=1e-5)
        assert row["effect"] == pytest.approx(((value - corrupted) / (clean - corrupted)).item(), abs=1e-4)


def test_models_without_rotation(shared_model: Any) -> None:
    for name in ("bloom", "opt"):
        model = shared_model("bridge", name)
        effects = table(model, "query", source=OTHER, layers=[0], heads=[0, HEAD])["effect"]
        assert effects.abs().max() < 1e-4
        assert table(model, "key", source=OTHER, layers=[0], heads=[0, HEAD])["effect"].abs().max() > 1e-3
