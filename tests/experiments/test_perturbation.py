"""Scrambling: which places change, what the three kinds have in common, and what the table says of a run."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo

from tl_posdisent import demo_tokens, load_demo_model, perturbation_curve, read_model
from tl_posdisent.experiments import perturb
from tl_posdisent.experiments.robustness.perturb import _exchanged
from tl_posdisent.experiments.robustness.perturbation_curve import lower_and_higher
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.rotated_scores import new_positions, phases

TEXT = zoo.random_tokens(24)
CURVE = partial(perturbation_curve, progress=False)
KINDS = ("order", "index", "feature")


# --- which places change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 100])
@pytest.mark.parametrize("n", [2, 3, 9, 40, 41])
def test_as_many_pairs_as_asked_for_change_places(n: int, window: int) -> None:
    for seed in range(20):
        for fraction in (0, 0.02, 0.1, 0.5, 0.9, 1):
            order = _exchanged(n, fraction, window, torch.Generator().manual_seed(seed))
            moved = [i for i in range(n) if order[i] != i]
            assert sorted(order) == list(range(n))
            assert all(order[order[i]] == i and abs(order[i] - i) <= window for i in moved)
            assert len(moved) == 2 * min(int(fraction * n / 2 + 0.5), n // 2)


def test_all_places_are_as_likely() -> None:
    """Of 7, each of the 6 neighbouring pairs; in a window of 3, near and far partners."""
    generator = torch.Generator().manual_seed(0)
    lefts, distances = Counter(), Counter()
    for _ in range(3000):
        order = _exchanged(7, 2 / 7, 1, generator)
        lefts[next(i for i in range(7) if order[i] != i)] += 1
        order = _exchanged(31, 0.1, 3, generator)
        distances[next(order[i] - i for i in range(31) if order[i] != i)] += 1
    assert set(lefts) == set(range(6))
    assert max(abs(count / 3000 - 1 / 6) for count in lefts.values()) < 0.03
    assert set(distances) == {1, 2, 3}
    assert min(distances.values()) > 500


def test_a_smaller_fraction_moves_a_part_of_what_a_larger_one_moves(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    moved = [perturb(model, TEXT, "order", f, seed=1).moved for f in (0.1, 0.3, 0.6, 0.8)]
    assert all(bool((more | ~less).all()) for less, more in itertools.pairwise(moved))
    assert [int(m[0].sum()) for m in moved] == [2, 6, 14, 18]  # of 23 that can move


@pytest.mark.parametrize("window", [1, 4])
def test_all_kinds_move_the_same_positions(window: int, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    assert all(perturb(model, TEXT, kind, 0).hooks == [] for kind in KINDS)
    for fraction in (0.2, 1.0):
        kinds = [perturb(model, TEXT, kind, fraction, seed=2, window=window, until=20) for kind in KINDS]
        order, index, feature = kinds
        assert torch.equal(order.moved, index.moved)
        assert torch.equal(order.moved, feature.moved)
        assert not order.moved[:, [0, 20, 21, 22, 23]].any()  # the first, and those from `until` on
        assert torch.equal(index.tokens, TEXT)
        assert torch.equal(feature.tokens, TEXT)
        assert torch.equal(order.tokens[~order.moved], TEXT[~order.moved])
        assert torch.equal(order.tokens.sort(1).values, TEXT.sort(1).values)
        for kind in kinds:
            pairs = [(bool(a), bool(b)) for a, b in itertools.pairwise(kind.moved[0])]
            assert kind.intact[0].tolist() == [not (a or b) for a, b in pairs]


# --- words -------------------------------------------------------------------------------------------------------

SPEECH = (
    "Fellow citizens:\n\n  We, the people of these United States — naïve, unconquerable —\tform a more perfect Union."
)


def test_words_move_as_a_whole() -> None:
    model, words = load_demo_model(), SPEECH.split()
    for seed, window in ((0, 1), (1, 4), (2, 4)):
        for fraction, moved in ((0.25, 4), (1, 16)):
            told = perturb(model, SPEECH, "order", fraction, seed=seed, window=window)
            got = model.tokenizer.decode(told.tokens[0]).removeprefix("<|endoftext|>").split()
            assert got[0] == words[0]
            assert sorted(got) == sorted(words)
            assert sum(a != b for a, b in zip(got, words, strict=True)) == moved


def test_ids_move_token_by_token_in_every_form_and_strings_word_by_word() -> None:
    model = load_demo_model()
    ids, options = model.to_tokens(SPEECH), {"kinds": ["order"], "fractions": [0.5], "seeds": 1}
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for unit, forms in (("token", (ids, encoded, [ids[0]])), ("word", (SPEECH, [SPEECH]))):
        expected = perturb(model, ids, "order", 0.5, unit=unit).tokens
        table = CURVE(model, ids, unit=unit, **options)
        for tokens in forms:
            assert torch.equal(perturb(model, tokens, "order", 0.5).tokens, expected)
            pd.testing.assert_frame_equal(CURVE(model, tokens, **options), table)


def test_a_text_without_beginning_of_text_keeps_its_first_word() -> None:
    model = load_demo_model()
    ids = model.to_tokens("We the people of", prepend_bos=False)
    got = perturb(model, ids, "order", 1, unit="word").tokens
    assert model.tokenizer.decode(got[0]) == "We people the of"


# --- order and index, index and feature ---------------------------------------------------------------------------


def seen_at(model: Any, tokens: torch.Tensor, hooks: Any, name: str) -> torch.Tensor:
    held: dict[str, torch.Tensor] = {}
    with torch.no_grad(), applied(model, [*hooks, (name, lambda x, hook: held.update(x=x.detach().clone()))]):
        held["logits"] = model(tokens)
    return held["x"]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
@pytest.mark.parametrize("window", [1, 6])
def test_index_gives_every_pair_of_tokens_the_score_that_order_gives_it(
    kind: str, name: str, window: int, shared_model: Any
) -> None:
    """In the first layer, as far as both masks let the pair be seen."""
    model = shared_model(kind, name)
    tokens = torch.randperm(zoo.VOCAB - 3, generator=torch.Generator().manual_seed(1))[None, :24] + 3  # all different
    order, index = (perturb(model, tokens, which, 0.7, seed=5, window=window) for which in KINDS[:2])
    spec = read_model(model).specs()[0]
    there, here = (seen_at(model, p.tokens, p.hooks, spec.taps.scores)[0] for p in (order, index))
    place = torch.tensor([order.tokens[0].tolist().index(t) for t in tokens[0].tolist()])
    there = there[:, place][:, :, place]
    both = spec.mask(24) & spec.mask(24)[place][:, place]
    torch.testing.assert_close(here[:, both], there[:, both], rtol=0, atol=2e-5)
    plain = seen_at(model, tokens, [], spec.taps.scores)[0]
    assert (here - plain)[:, both].abs().max() > 0.1


def phase_errors(perturbed: Any, spec: Any) -> torch.Tensor:
    """By what factor of length 1 queries and keys are turned too far, ``[batch, pos, subspace]``."""
    record, places = perturbed.hooks.records[spec.layer, 0], torch.arange(TEXT.shape[1])
    moved = spec.rotary.angles(new_positions(record, places, len(TEXT))) - spec.rotary.angles(places)
    return torch.exp(1j * (moved + phases(record, spec.rotary, places, len(TEXT))))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_feature_has_the_phase_errors_of_index_dealt_out_anew(kind: str, name: str, shared_model: Any) -> None:
    """At each frequency the same errors over the positions that moved; with index those of a token belong together."""
    model = shared_model(kind, name)
    spec = read_model(model).specs()[0]
    frequencies = spec.rotary.frequencies
    index, feature = (perturb(model, TEXT, k, 0.8, seed=7, window=5) for k in KINDS[1:])
    told, dealt = (phase_errors(p, spec) for p in (index, feature))
    shifts = told[..., frequencies.argmin()].angle() / frequencies.min()
    belonging = torch.exp(1j * shifts[..., None] * frequencies)
    torch.testing.assert_close(told, belonging, rtol=0, atol=2e-3)
    assert (dealt - torch.exp(1j * shifts[..., None] * frequencies)).abs().max() > 0.5
    assert torch.equal((shifts.abs() > 1e-2), index.moved)
    assert 1 < shifts[index.moved].std() < 4
    torch.testing.assert_close(shifts, shifts.round(), rtol=0, atol=1e-2)
    for row in range(2):
        at = index.moved[row]
        assert (dealt[row, ~at] - 1).abs().max() < 1e-5
        apart = (dealt[row, at][:, None] - told[row, at]).abs()  # [one, other, subspace]
        assert max(apart.amin(0).max(), apart.amin(1).max()) < 2e-3


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_measures_by_hand(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = CURVE(model, TEXT, fractions=[0.3], seeds=[4]).set_index("kind")
    with torch.no_grad():
        clean = model(TEXT).double().softmax(-1)
    for which in KINDS:
        told = perturb(model, TEXT, which, 0.3, seed=4)
        with torch.no_grad(), applied(model, told.hooks):
            now = model(told.tokens).double().softmax(-1)
        losses, hits, added, kl = [], [], [], []
        for row in range(2):
            for p in range(23):
                chances, target = now[row, p], told.tokens[row, p + 1]
                losses.append(-chances[target].log())
                hits.append(bool(chances.argmax() == target))
                if not told.moved[row, p] and not told.moved[row, p + 1]:
                    assert target == TEXT[row, p + 1]
                    added.append(losses[-1] + clean[row, p, target].log())
                    kl.append((clean[row, p] * (clean[row, p] / chances).log()).sum())
        row = table.loc[which]
        assert row["perplexity"] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)
        assert row["accuracy"] == pytest.approx(sum(hits) / 46)
        assert row["added_loss"] == pytest.approx(float(torch.stack(added).mean()), abs=1e-5)
        assert row["kl"] == pytest.approx(float(torch.stack(kl).mean()), abs=1e-5)
        assert row["kl"] > 1e-3
        assert row["moved"] == pytest.approx(float(told.moved.double().mean()))
        assert row["intact"] == pytest.approx(len(kl) / 46)
        assert "perplexity_se" not in row


def test_rows_are_means_over_seeds_with_their_error(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    options: dict[str, Any] = {"kinds": ["order", "feature"], "fractions": [0, 0.4, 1], "window": 3}
    table = CURVE(model, TEXT, seeds=3, **options)
    single = [CURVE(model, TEXT, seeds=[seed], **options) for seed in range(3)]
    assert list(zip(table["kind"], table["fraction"], strict=True)) == [
        (kind, fraction) for kind in options["kinds"] for fraction in options["fractions"]
    ]
    for name in ("perplexity", "accuracy", "added_loss", "kl"):
        runs = pd.concat([one[name] for one in single], axis=1)
        pd.testing.assert_series_equal(table[name], runs.mean(axis=1), check_names=False)
        pd.testing.assert_series_equal(table[f"{name}_se"], runs.std(axis=1) / 3**0.5, check_names=False)
    assert (table["draws"] == 3).all()
    both = CURVE(model, TEXT, seeds=2, **options)
    for name in ("perplexity", "added_loss"):
        runs = np.sort(np.stack([one[name] for one in single[:2]]), axis=0)
        np.testing.assert_allclose(np.stack(lower_and_higher(both, name)), runs, atol=1e-12, rtol=1e-12)
    zero = table[table["fraction"] == 0]
    assert (zero[["moved", "added_loss", "kl", "perplexity_se"]] == 0).all(axis=None)
    assert (zero["intact"] == 1).all()
    assert zero["perplexity"].iloc[0] == zero["perplexity"].iloc[1]
    whole = table[table["fraction"] == 1]
    assert (whole["moved"] == 22 / 24).all()
    assert whole[["perplexity", "accuracy"]].notna().all(axis=None)


def test_a_model_without_rotary_has_an_order() -> None:
    model = zoo.bridge("gpt2")
    table = CURVE(model, TEXT, ["order"], [0, 0.5], seeds=2)
    assert table["kl"].iloc[1] > 0.01
    for kind in KINDS[1:]:
        with pytest.raises(ValueError, match=r'kind must be "order" .* perturb needs rotary .* layer 0 of GPT2'):
            CURVE(model, TEXT, [kind])


# --- downstream ------------------------------------------------------------------------------------------------------


def test_downstream_functions_see_what_the_text_sees(shared_model: Any) -> None:
    model, seen = shared_model("bridge", "llama-gqa"), []

    def downstream(given: Any, perturbation: Any) -> float:
        assert given is model
        seen.append(perturbation(TEXT))
        return float(len(seen))

    table = CURVE(model, TEXT, fractions=[0, 0.5], seeds=[3, 8], downstream=downstream)
    assert table["downstream"].tolist() == [1, 2.5, 1, 4.5, 1, 6.5]  # the untouched model is asked once
    assert table["downstream_se"].tolist() == [0, 0.5, 0, 0.5, 0, 0.5]
    expected = [perturb(model, TEXT, kind, 0.5, seed=seed) for kind in KINDS for seed in (3, 8)]
    for got, wanted in zip(seen[1:], expected, strict=True):
        assert torch.equal(got.tokens, wanted.tokens)
        assert torch.equal(got.moved, wanted.moved)
        assert repr(got.hooks) == repr(wanted.hooks)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_texts_in_which_nothing_stays_intact_are_said() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=3)
    told = "tokens: added_loss and kl are NaN in 1 of 2 rows, because no prediction .* give longer texts, smaller"
    with pytest.warns(UserWarning, match=told):
        table = perturbation_curve(model, tokens, ["order"], [0, 1], seeds=1, progress=False)
    assert table["added_loss"].isna().tolist() == [False, True]


def test_logits_that_are_no_numbers_are_refused(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    broken = [("unembed.hook_out", lambda x, hook: x * torch.nan)]
    with pytest.raises(ValueError, match="the model's logits are not finite"), applied(model, broken):
        CURVE(model, TEXT, ["order"], [0.5], seeds=1)


def test_models_that_see_what_follows_are_refused(shared_model: Any) -> None:
    reading = read_model(shared_model("bridge", "llama-gqa"))
    reading = replace(reading, attention=tuple(replace(spec, causal=False) for spec in reading.attention))
    with pytest.raises(ValueError, match="model must be causal"):
        CURVE(reading, TEXT, ["order"])
