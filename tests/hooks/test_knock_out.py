"""Attention knock-out and results at chosen tokens: slots in every form, a mask of the model's own, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L, close, logits, mixed_of
from torch import Tensor

from tl_posdisent import ablate_heads, dummy_distance, knock_out, lambda_mask
from tl_posdisent.hooks import applied
from tl_posdisent.utils.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")


def masked(model: Any, hidden: Tensor) -> Tensor:
    """Logits under the model's own mask, without the hidden cells ``[*batch, query, key]``."""
    seen = torch.ones(L, L, dtype=torch.bool).tril() & ~hidden
    seen = seen.expand(2, L, L)[:, None]
    with torch.no_grad():
        return model(TOKENS, attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf))


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gpt2"))
def test_a_knock_out_is_a_mask(name: str, shared_model: Any) -> None:
    model = shared_model("bridge", name)
    cells = torch.rand(2, L, L, generator=torch.Generator().manual_seed(0)) < 0.4
    cells[:, torch.arange(L), torch.arange(L)] = False
    block = torch.zeros(L, L, dtype=torch.bool)
    block[7:10, 2:5] = True
    for hooks, hidden in (
        (knock_out(model, cells=cells), cells),
        (knock_out(model, cells=cells[0]), cells[0]),
        (knock_out(model, range(7, 10), range(2, 5)), block),
        (knock_out(model, [7, 8, 9], [2, 3, 4]), block),
    ):
        got = logits(model, hooks)
        close(got, masked(model, hidden))
        assert (got - logits(model, [])).abs().max() > 0.01


def test_chosen_heads_and_forms_of_slots(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    marks = torch.zeros(L, dtype=torch.bool)
    marks[[2, 3, 4]] = True
    expected, plain = mixed_of(model, knock_out(model, [-1], marks, layers=0, heads=[1, 6])), mixed_of(model, [])
    for queries, keys in ((-1, range(2, 5)), (L - 1, slice(2, 5)), ([L - 1], torch.tensor([4, 2, 3]))):
        assert torch.equal(mixed_of(model, knock_out(model, queries, keys, layers=0, heads=[1, 6])), expected)
    others, before = [0, 2, 3, 4, 5, 7], slice(0, L - 1)
    assert torch.equal(expected[:, others], plain[:, others])
    assert torch.equal(expected[:, :, before], plain[:, :, before])
    assert (expected - plain)[:, [1, 6], -1].abs().amax((0, 2)).min() > 1e-3
    for queries, keys, text in (
        (-1, range(2, 5), "queries=-1, keys=2…4"),
        ((3, 5), None, "queries=[3, 5]"),
        (slice(2, None), 0, "queries=2:, keys=0"),
    ):
        assert text in repr(knock_out(model, queries, keys))


def test_a_query_keeps_a_key(shared_model: Any) -> None:
    """Its own if no other; what other interventions hide counts too."""
    model = shared_model("bridge", "llama-gqa")
    for hooks in (
        knock_out(model, 0, 0),
        knock_out(model, keys=range(L)),
        knock_out(model, 5, range(3)) + knock_out(model, 5, range(3, 6)),
        lambda_mask(model, 0, 2) + knock_out(model, 5, [4, 5]),
    ):
        with pytest.raises(
            ValueError, match=r"(knock_out|lambda_mask) must leave each query a key, .* query \d would see none"
        ):
            logits(model, hooks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "keys or queries or cells must be given, or no query would see any key, got None for all"),
        ({"queries": 1, "cells": torch.ones(2, 2, dtype=torch.bool)}, "cells must not be given beside queries or keys"),
        ({"cells": torch.ones(L, L)}, r"cells must be booleans \[query, key\] or .* got torch.float32 \(12, 12\)"),
        ({"keys": 1.5}, "keys must be integers of 64 bits, a range, a slice or booleans, got 1.5"),
        ({"keys": "3"}, "keys must be integers of 64 bits, a range, a slice or booleans, got '3'"),
        ({"keys": [0, 2.0]}, "keys must be integers of 64 bits, a range, a slice or booleans, got"),
        ({"queries": [1, 1]}, "queries must name at least one and none twice"),
        ({"queries": []}, "queries must name at least one and none twice"),
        ({"queries": slice(None, None, -1)}, "queries must be a slice of integers with a step of at least 1"),
        ({"queries": slice("a")}, "queries must be a slice of integers with a step of at least 1"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str, shared_model: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        knock_out(shared_model("bridge", "llama-gqa"), **arguments)


def test_refusals_while_running(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for hooks, message in (
        (knock_out(model, L, 0), "queries must be integers from 0 to 11"),
        (knock_out(model, 3, torch.ones(5, dtype=torch.bool)), r"keys must have shape \(pos,\) = \(12,\) as booleans"),
        (knock_out(model, cells=torch.zeros(3, 3, dtype=torch.bool)), r"cells must have shape .* got \(3, 3\)"),
        (ablate_heads(model, [(0, 1)], positions=20), "positions must be integers from 0 to 11"),
        (knock_out(model, -1, slice(50, 60)), "keys must choose a slot of the running text, which has 12, got none"),
    ):
        with pytest.raises(ArgumentError, match=message):
            logits(model, hooks)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
def test_results_at_chosen_tokens(mode: Any, kind: str, name: str, shared_model: Any) -> None:
    """The others keep theirs, and those chosen have what an ablation of all tokens gives."""
    model = shared_model(kind, name)
    options = {"mode": mode, "layers": [0], "reference": TOKENS if mode == "mean" else None}
    everywhere, plain = mixed_of(model, ablate_heads(model, [1, 6], **options)), mixed_of(model, [])
    marks = torch.zeros(L, dtype=torch.bool)
    marks[[2, 3, L - 1]] = True
    for positions in ([2, 3, -1], marks):
        hooks = ablate_heads(model, [1, 6], positions=positions, **options)
        got = mixed_of(model, hooks)
        assert torch.equal(got[:, :, marks], everywhere[:, :, marks])
        assert torch.equal(got[:, :, ~marks], plain[:, :, ~marks])
    assert repr(hooks) == f"ablate_heads({mode}, 3 slots) on L0H1, L0H6"


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_results_at_chosen_tokens_need_the_whole_text(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 3}
    hooks = ablate_heads(model, [(0, 1)], positions=-1)
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        assert model.generate(TOKENS, use_past_kv_cache=False, **options).shape == (2, L + 3)
        with pytest.raises(ValueError, match=r"layer 0 has 1 queries for 13 keys: .* use_past_kv_cache=False"):
            model.generate(TOKENS, use_past_kv_cache=True, **options)


@pytest.mark.parametrize("bias", [-60.0, -5.0, 3.0])
def test_a_bias_of_the_users_own_is_refused(bias: float, shared_model: Any) -> None:
    """Also one that is as large as a mask, on all keys."""
    model = shared_model("bridge", "llama-gqa")
    own = ("blocks.0.attn.hook_attn_scores", lambda x, hook: torch.where(x > -1e30, x + bias, x))
    hooks = knock_out(model, keys=[0, 1], queries=range(4, L), layers=0)
    with model.hooks(fwd_hooks=[own]), pytest.raises(ValueError, match="or a bias that cannot be seen here"):
        logits(model, hooks)


@pytest.mark.parametrize("mask", [-60.0, -500.0, -1e4, -1e9])
def test_keys_that_the_user_hides_stay_hidden(mask: float, shared_model: Any) -> None:
    """By whatever is added to their scores."""
    model, name = shared_model("bridge", "llama-gqa"), "blocks.0.attn.hook_pattern"
    hidden = torch.zeros(L, L).masked_fill(torch.arange(L) == 3, mask).fill_diagonal_(0)
    own = ("blocks.0.attn.hook_attn_scores", lambda x, hook: x + hidden)
    for hooks in (dummy_distance(model, 2, layers=0), knock_out(model, keys=1, queries=[5, 6], layers=0)):
        with torch.no_grad(), model.hooks(fwd_hooks=[own]), model.hooks(fwd_hooks=hooks):
            pattern = model.run_with_cache(TOKENS, names_filter=name)[1][name]
        assert float(pattern[..., 4:, 3].max()) < 1e-12
        assert float(pattern[..., 3, 3].max()) > 1e-3


def test_what_is_given_may_be_changed_afterwards(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    cells, marks = torch.zeros(L, L, dtype=torch.bool), torch.zeros(L, dtype=torch.bool)
    cells[5, 2], marks[5] = True, True
    made = (knock_out(model, cells=cells), knock_out(model, marks, 2), ablate_heads(model, [(0, 1)], positions=marks))
    expected = [logits(model, hooks) for hooks in made]
    cells.fill_(False)
    marks.fill_(False)
    assert all(torch.equal(logits(model, hooks), x) for hooks, x in zip(made, expected, strict=True))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("bloom", "mpt"))
def test_beside_a_hook_of_the_users_own_and_results_of_other_texts(kind: str, name: str, shared_model: Any) -> None:
    """Where a bias is added to the scores: a sum equals one list around the other."""
    model = shared_model(kind, name)
    hooks = knock_out(model, range(1, L), 0)
    own = [("blocks.0.hook_resid_pre", lambda x, hook: 1.5 * x)]
    for other in (own, ablate_heads(model, [(1, 2)], mode="resample")):
        with torch.no_grad(), applied(model, hooks), applied(model, other):
            expected = model(TOKENS)
        for together in (hooks + other, other + hooks):
            with torch.no_grad(), applied(model, together):
                assert torch.equal(model(TOKENS), expected)
