"""Models that are odd in one way, and refusals that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import zoo

import tl_posdisent as tp
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit
from tl_posdisent.hooks.hook_list import hooks_for, replace_scores
from tl_posdisent.models.reading.probe import judge_edits, listen
from tl_posdisent.models.reading.seen import Seen
from tl_posdisent.models.running.forward_pass import running

pytestmark = pytest.mark.tl4

TOKENS = zoo.random_tokens(10)
Shared = Callable[[str, str], Any]


@pytest.fixture
def llama(shared_model: Shared) -> Any:
    return shared_model("bridge", "llama-gqa")


def test_a_layer_that_discards_edited_scores_is_found_out(llama: Any) -> None:
    """Its pattern must be that of the edited scores."""
    spec = tp.read_model(llama).specs()[0]
    with running(llama, bare=True) as p:
        seen = listen(p, TOKENS, [0])[0]
    assert judge_edits(spec, seen) == spec
    ignored = Seen({**seen, "hook_attn_scores": seen["hook_attn_scores"].flip(1)})
    judged = judge_edits(spec, ignored)
    assert not judged.limits.scores_editable
    assert judged.limits.no_rotation == "discards edited scores"
    hidden = judge_edits(spec.with_taps(scores=None, v=None).with_limits(scores_editable=False), seen)
    assert hidden.limits.no_rotation.startswith("shows no scores, and its hook_z is not the sum of its values")


@pytest.mark.usefixtures("unchecked")
def test_a_layer_that_takes_no_edit_is_refused(llama: Any) -> None:
    spec = tp.read_model(llama).specs()[0]
    closed = spec.with_limits(scores_editable=False)
    hidden = spec.with_taps(scores=None, z=None)
    hides = "shows no scores, and its hook_z is not the sum of its values, weighted by its pattern"
    for layer, why in ((closed, "discards edited scores"), (hidden, hides)):
        with pytest.raises(ValueError, match=rf"{why}: edit its results .* or load the model with the"):
            replace_scores(layer, [0], lambda view: view.scores, "a test")
    unread = spec.with_taps(q=None).with_limits(problem="hook_q does not fire")
    with pytest.raises(ValueError, match="hook_q does not fire"):
        hooks_for([(unread, [0])], ScoreEdit("a test", lambda view: view.scores, Order.REPLACE, vectors=True))
