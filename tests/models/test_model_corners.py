"""Models that are odd in one way, and refusals that name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import zoo

import tl_posdisent as tp
from tl_posdisent.hooks.edits.rotation_edits import FrequencyLimit
from tl_posdisent.hooks.hook_list import hooks_for, replace_scores
from tl_posdisent.models.reading.probe import judge_turns, listen
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import check_tokens

pytestmark = pytest.mark.tl4

TOKENS = zoo.random_tokens(10)
Shared = Callable[[str, str], Any]


@pytest.fixture
def llama(shared_model: Shared) -> Any:
    return shared_model("bridge", "llama-gqa")


def test_a_band_is_dropped_alike_at_a_hook_and_by_recomputed_scores(llama: Any) -> None:
    """Of a model that has no hook for turned queries, the same scores are computed anew."""
    spec = tp.read_model(llama).specs()[1]
    assert spec.rotary is not None
    assert spec.turn_q is not None
    edit = FrequencyLimit("limit_frequencies", float(spec.rotary.frequencies.median()) * 0.99, torch.inf, "drop")
    with torch.no_grad():
        untouched = llama(TOKENS)
        both = [
            llama.run_with_hooks(TOKENS, fwd_hooks=hooks_for([(s, [0, 1])], edit))
            for s in (spec, replace(spec, turn_q=None))
        ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-5)
    assert float((both[0] - untouched).abs().max()) > 1e-3


def test_a_layer_that_discards_turned_vectors_is_found_out(llama: Any) -> None:
    """What is seen at the hooks where vectors are turned must be what the scores are made of."""
    spec = tp.read_model(llama).specs()[0]
    assert spec.turn_q is not None
    with running(llama, bare=True) as p:
        seen = listen(p, TOKENS, [0])[0]
    assert judge_turns(spec, seen) == spec
    short = spec.turn_q.name.rsplit(".", 1)[-1]
    ignored = {**seen, short: seen[short] + torch.randn_like(seen[short])}
    judged = judge_turns(spec, ignored)
    assert judged.turn_q is None
    assert judged.turn_k is None
    assert judged.no_rotation is not None
    assert "discards edits at" in judged.no_rotation
    without = judge_turns(replace(spec, turn_q=None), seen)
    assert without.no_rotation == "has no hook at which turned queries and keys can be set"


@pytest.mark.usefixtures("unchecked")
def test_a_layer_that_takes_no_edit_is_refused(llama: Any) -> None:
    spec = tp.read_model(llama).specs()[0]
    closed = replace(spec, scores_editable=False)
    hidden = replace(spec, scores=None, z=None)
    hides = "shows no scores, and its hook_z is not the sum of the values at its hooks, weighted by its pattern"
    for layer, why in ((closed, "discards edited scores"), (hidden, hides)):
        with pytest.raises(ValueError, match=rf"{why}: edit its results .* or load the model with the"):
            replace_scores(layer, [0], lambda view: view.scores, "a test")
    unread = replace(spec, q=None, problem="hook_q does not fire")
    with pytest.raises(ValueError, match="hook_q does not fire"):
        replace_scores(unread, [0], lambda view: view.scores, "a test", vectors=True)


@pytest.mark.usefixtures("unchecked")
def test_half_a_surrogate_pair_is_no_text() -> None:
    model = tp.load_demo_model(backend="bridge")
    with pytest.raises(ValueError, match="text that is not valid UTF-8"):
        check_tokens(model, "broken \ud800 text")
    with pytest.raises(ValueError, match="parameters are meta tensors"):
        check_tokens(model.to("meta"), torch.tensor([1, 2]))
