"""Heads with weights set by hand fall at the corners of the where–what plane for which they were made."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, exp
from typing import Any

import pytest
import torch
from support import heads_by_hand as by_hand
from support import zoo
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import dummy_distance, remap_distance
from tl_posdisent.experiments import where_or_what
from tl_posdisent.hooks import substitute_attention
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.usefixtures("unchecked")

REFERENCE, TEXTS = by_hand.draw_texts(16, seed=1), by_hand.draw_texts(16, seed=2)
MORE = by_hand.draw_texts(32, seed=3)  # by which the difference of the parts of the head *both* is known
CORNERS = {"where": (1, 0), "what": (0, 1), "neither": (1, 1), "both": (0, 0)}
IN_BOTH_CLASSES = pytest.mark.parametrize("wrapper", zoo.KINDS)


def wrapped(wrapper: str) -> Any:
    return {"bridge": zoo.as_bridge, "hooked": zoo.as_hooked}[wrapper](by_hand.model())


# --- attention from the tokens, in plain Python -----------------------------------------------------------------

Keys = Callable[[str, list[int], int], list[int]]


def keys_of(head: str, kinds: list[int], i: int) -> list[int]:
    """Return the keys over which query i of a head spreads its attention evenly."""
    if head in ("where", "not used"):
        return [max(i - 1, 0)]
    of_next_kind = [j for j in range(i + 1) if kinds[j] == (kinds[i] + 1) % 4]
    if head == "what":
        return of_next_kind or list(range(i + 1))
    return of_next_kind[-1:] or [i]


def keys_at_one_distance(head: str, kinds: list[int], i: int) -> list[int]:
    """The same where no key is nearer than another."""
    return list(range(i + 1)) if head in ("where", "not used") else keys_of("what", kinds, i)


def plain_attention(head: str, texts: Tensor, keys: Keys = keys_of) -> Tensor:
    """Compute attention ``[text, query, key]`` in float64."""
    attention = torch.zeros(*texts.shape, texts.shape[1], dtype=torch.float64)
    for text, row in zip(texts, attention, strict=True):
        kinds = by_hand.attributes(text)[1].tolist()
        for i in range(len(text)):
            attended = keys(head, kinds, i)
            row[i, attended] = 1 / len(attended)
    return attention


def plain_values(head: str, texts: Tensor, keys: Keys = keys_of, *, with_topic: float = 0.0) -> Tensor:
    """Compute what a head reads, ``[text, query]``."""
    topic, _, label, sign = by_hand.attributes(texts)
    read = {"where": sign, "what": label, "neither": topic, "both": sign, "not used": torch.zeros_like(sign)}[head]
    return torch.einsum("tqk,tk->tq", plain_attention(head, texts, keys), read + with_topic * topic.double())


def leak(head: str) -> float:
    """Bound the attention that a head pays to other keys than those above."""
    if head in ("where", "not used"):
        peak = sum(by_hand.PREVIOUS)
        waves = [sum(a * cos(10**-n * (d - 1)) for n, a in enumerate(by_hand.PREVIOUS)) for d in range(64) if d != 1]
        return sum(exp(wave - peak) for wave in waves)
    if head == "what":
        return 64 * exp(-by_hand.NEXT_KIND)
    slope = by_hand.PER_POSITION * cos(32 * 1e-2)  # of the sine at both ends of the text, where it is least
    return sum(exp(-slope * n) for n in range(1, 64))


def divergence(v: Tensor, other: Tensor) -> Tensor:
    """Compute the divergence, in nats, of two predictions of a bit that is +1 with probability sigmoid(2 v)."""
    log_p, log_q = (torch.nn.functional.logsigmoid(2 * torch.stack([x, -x])) for x in torch.broadcast_tensors(v, other))
    return (log_p.exp() * (log_p - log_q)).sum(0)


# --- the model --------------------------------------------------------------------------------------------------


def mean_output(model: Any, head: int, reference: Tensor) -> Any:
    """Put a head's mean over the reference in its place, but for first tokens."""
    name = "blocks.0.attn.hook_z"
    with torch.no_grad():
        mean = model.run_with_cache(reference, names_filter=name)[1][name][:, 1:, head].double().mean((0, 1))

    def put(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, 1:, head] = mean.to(z)
        return z

    return [(name, put)]


def interventions(model: Any, head: str, reference: Tensor) -> dict[str, list[Hooks]]:
    """Return those of K_mean, K_D and K_C, where the smallest divergence counts, and two more."""
    chosen = [(0, by_hand.HEADS.index(head))]
    n = reference.shape[1]
    others = [torch.full((n, n), float(d)).fill_diagonal_(0) for d in (1, 5, 32)]
    return {
        "mean": [mean_output(model, chosen[0][1], reference)],
        "distance": [substitute_attention(model, "distance+sink", fitted_to=reference, heads=chosen)],
        "content": [remap_distance(model, distances, heads=chosen) for distances in others],
        "one distance": [dummy_distance(model, d, heads=chosen) for d in (1, 5, 32)],
        "uniform": [substitute_attention(model, "uniform", heads=chosen)],
    }


def exact_divergences(model: Any, head: str, texts: Tensor = TEXTS, reference: Tensor = REFERENCE) -> dict[str, float]:
    """Measure one head changed alone, one run for each intervention, at tokens between the first and the last."""

    def log_predictions(hooks: Any) -> Tensor:
        with torch.no_grad():
            return model.run_with_hooks(texts, fwd_hooks=hooks)[:, 1:-1].double().log_softmax(-1)

    untouched, found = log_predictions([]), {}
    for name, tried in interventions(model, head, reference).items():
        changed = [log_predictions(hooks) for hooks in tried]
        found[name] = min(float((untouched.exp() * (untouched - x)).sum(-1).mean()) for x in changed)
    return found


def recovered(exact: dict[str, float]) -> dict[str, float]:
    """Compute the shares of K_mean that interventions leave; of "distance" it is where, and of "content" what."""
    return {name: 1 - x / exact["mean"] for name, x in exact.items()}


@IN_BOTH_CLASSES
def test_heads_attend_to_what_they_are_made_for(wrapper: str) -> None:
    with torch.no_grad():
        _, cache = wrapped(wrapper).run_with_cache(TEXTS, names_filter="blocks.0.attn.hook_pattern")
    uneven = by_hand.NEXT_KIND * (1 - cos(64e-4))  # of scores: the planes that see content turn a little
    for head, pattern in zip(by_hand.HEADS, cache["blocks.0.attn.hook_pattern"].unbind(1), strict=True):
        attention = plain_attention(head, TEXTS)
        torch.testing.assert_close(pattern.double(), attention, rtol=0, atol=leak(head) + uneven)


@pytest.mark.slow
@IN_BOTH_CLASSES
def test_divergences_are_those_of_what_heads_read(wrapper: str) -> None:
    """K_mean, and K with every key at one distance, from the tokens alone."""
    model = wrapped(wrapper)
    for head in by_hand.HEADS:
        exact, v = exact_divergences(model, head), plain_values(head, TEXTS)
        expected = {
            "mean": divergence(v, plain_values(head, REFERENCE)[:, 1:].mean()),
            "one distance": divergence(v, plain_values(head, TEXTS, keys_at_one_distance)),
        }
        for name, of_tokens in expected.items():
            off = 0 if head in ("neither", "not used") else 2 * leak(head)  # error of v
            steepest = 2 + 2  # slopes of the divergence in its two arguments, at most
            assert exact[name] == pytest.approx(float(of_tokens[:, 1:-1].mean()), abs=steepest * off + rounding(1.0))


@IN_BOTH_CLASSES
def test_heads_fall_at_their_corners(wrapper: str) -> None:
    """The corner "both" is farthest off: the first tokens of a text have one earlier token of the next kind or none.

    Over nine draws of texts its (where, what) was within (.19, .27) of the corner, all others within .1.
    """
    model = wrapped(wrapper)
    for head, corner in CORNERS.items():
        exact = exact_divergences(model, head)
        assert exact["mean"] > 0.2  # nats
        shares = recovered(exact)
        assert (shares["distance"], shares["content"]) == pytest.approx(corner, abs=0.35 if head == "both" else 0.15)
        assert shares["uniform"] == pytest.approx(float(head == "neither"), abs=0.15)
    assert set(exact_divergences(model, "not used").values()) == {0}


@IN_BOTH_CLASSES
def test_where_distance_tells_content_either_replaces_the_pattern(wrapper: str) -> None:
    """Both shares are 1 then, as for a head whose pattern does not matter: only uniform attention tells them apart."""
    model, texts = wrapped(wrapper), [by_hand.draw_texts(16, seed=seed, in_turn=True) for seed in (2, 1)]
    for head in ("what", "neither"):
        shares = recovered(exact_divergences(model, head, *texts))
        assert [shares["distance"], shares["content"]] == pytest.approx([1, 1], abs=1e-3)
        assert shares["uniform"] == pytest.approx(float(head == "neither"), abs=0.15)
    by_head = dict(zip(by_hand.HEADS, verdicts(model, texts[1], texts[0]), strict=True))
    assert (by_head["what"], by_head["neither"]) == ("mixed", "neither")
    joint = where_or_what(model, texts[1], texts[0], exact="all", progress=False)["joint"]
    assert joint[by_hand.HEADS.index("what")] == pytest.approx(-1, abs=0.15)


@pytest.mark.slow
@IN_BOTH_CLASSES
def test_a_duplicate_head_needs_its_own_token_apart(wrapper: str) -> None:
    """With every key at one distance, a token gets as much attention as its other copy: half of the signs are wrong."""
    model = {"bridge": zoo.as_bridge, "hooked": zoo.as_hooked}[wrapper](by_hand.with_duplicate_head())
    reference, texts = (by_hand.draw_read_twice(16, seed) for seed in (1, 2))
    sign = by_hand.attributes(texts)[3].double()
    copies = texts[:, :, None] // 2 == texts[:, None] // 2
    first = copies.int().argmax(-1)  # of each token, itself in the first half
    v, confused = sign.gather(1, first), (sign + sign.gather(1, first)) / 2
    exact = exact_divergences(model, "what", texts, reference)
    close = 4 * exp(-by_hand.PER_POSITION * cos(0.32)) + rounding(1.0)
    one_distance = float(divergence(v, confused)[:, 1:-1].mean())
    assert one_distance > exact["mean"] / 5
    assert exact["one distance"] == pytest.approx(one_distance, abs=close)
    assert exact["content"] == pytest.approx(0, abs=close)
    assert verdicts(model, reference, texts, exact="all")[by_hand.HEADS.index("what")] == "what"


# --- where_or_what ----------------------------------------------------------------------------------------------


def verdicts(model: Any, *tokens: Any, **options: Any) -> list[str]:
    return where_or_what(model, *tokens, progress=False, **options)["verdict"].tolist()


def are_as_made(found: list[str]) -> bool:
    """Whether heads have the verdicts that they were made for. Of the head *both*, content is the larger part: the
    first tokens of a text have one earlier token of the next kind or none."""
    by_head = dict(zip(by_hand.HEADS, found, strict=True))
    return by_head.pop("both") in ("mixed", "what") and all(head == verdict for head, verdict in by_head.items())


@IN_BOTH_CLASSES
def test_verdicts_are_the_corners(wrapper: str) -> None:
    model = wrapped(wrapper)
    for seed in range(2):
        assert are_as_made(verdicts(model, MORE, exact=0, seed=seed))
    assert are_as_made(verdicts(model, REFERENCE, MORE, exact="all"))


PARTS = ["where_part", "what_part", "neither_part"]
PURE = {"where": (1, 0, 0), "what": (0, 1, 0), "both": (0.5, 0.5, 0), "neither": (0, 0, 1)}


@IN_BOTH_CLASSES
def test_parts_are_those_of_the_corners(wrapper: str) -> None:
    """With the joint part of a head that needs both."""
    table = where_or_what(wrapped(wrapper), REFERENCE, TEXTS, exact="all", progress=False)
    for head, parts in PURE.items():
        row = table.loc[by_hand.HEADS.index(head)]
        assert row[PARTS].tolist() == pytest.approx(parts, abs=0.25 if head == "both" else 0.12)
        joint = 1.0 if head == "both" else 0.0
        assert row["joint"] == pytest.approx(joint, abs=0.45 if head == "both" else 0.15)


@IN_BOTH_CLASSES
@pytest.mark.parametrize("topic", [1.0, *slow([1.5])])
def test_points_between_corners(wrapper: str, topic: float) -> None:
    """Heads that also read the topic, which any key tells: their parts from the tokens alone.

    The head *where* keeps all with distances alone, and with content alone what uniform attention keeps; the head
    *what* keeps all with content alone.
    """
    model = {"bridge": zoo.as_bridge, "hooked": zoo.as_hooked}[wrapper](by_hand.model(topic))
    table = where_or_what(model, REFERENCE, TEXTS, exact="all", progress=False)

    def values(head: str, texts: Tensor, keys: Keys = keys_of) -> Tensor:
        return plain_values(head, texts, keys, with_topic=topic)[:, 1:]

    for head in ("where", "what"):
        v, mean = values(head, TEXTS), values(head, REFERENCE).mean()
        even = values(head, TEXTS, lambda head, kinds, i: list(range(i + 1)))
        contribution, lost = (float(divergence(v, other)[:, :-1].mean()) for other in (mean, even))
        neither = 1 - lost / contribution
        row, close = table.loc[by_hand.HEADS.index(head)], 4 * 2 * leak(head) * (1 + topic) / contribution + 1e-3
        assert row["contribution"] == pytest.approx(contribution, abs=close)
        assert row["kept_uniform"] == pytest.approx(neither, abs=close)
        assert 0.05 < neither < 0.95
        kept = row["kept_distance"] if head == "where" else row["kept_content"]
        assert kept == pytest.approx(1, abs=0.02)
        other = max(row["kept_content"] if head == "where" else row["kept_distance"], neither)
        own, rest = (1 - neither + 1 - other) / 2, (other - neither) / 2
        expected = [own, rest, neither] if head == "where" else [rest, own, neither]
        assert row[PARTS].tolist() == pytest.approx(expected, abs=0.02)
    both = table.loc[by_hand.HEADS.index("both"), PARTS].tolist()
    assert both[2] > 0.02
    assert both[0] == pytest.approx(both[1], abs=0.2)


@pytest.mark.parametrize(("side", "exact"), [("left", 0), *slow([("right", "all")])])
@IN_BOTH_CLASSES
def test_verdicts_in_a_padded_batch(wrapper: str, side: str, exact: Any) -> None:
    lengths = 33 + 8 * (torch.arange(len(MORE)) // 2 % 4)
    there = torch.arange(MORE.shape[1]) < lengths[:, None]
    batch = {"input_ids": MORE, "attention_mask": (there.flip(1) if side == "left" else there).long()}
    assert are_as_made(verdicts(wrapped(wrapper), batch, exact=exact))


@pytest.mark.slow
@IN_BOTH_CLASSES
def test_shares_are_those_of_single_runs(wrapper: str) -> None:
    model = wrapped(wrapper)
    table = where_or_what(model, REFERENCE, TEXTS, exact="all", progress=False)
    for head, row in zip(by_hand.HEADS[:-1], table.itertuples(), strict=False):
        exact = exact_divergences(model, head)
        shares, error = recovered(exact), rounding(3.0)
        assert row.contribution == pytest.approx(exact["mean"], abs=error)
        measured = row.kept_distance, row.kept_content
        assert measured == pytest.approx((shares["distance"], shares["content"]), abs=2 * error / exact["mean"])
