"""One head in words: its numbers against plain passes and tables, its answer against that of all heads."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from support import heads_by_hand as by_hand
from support import zoo
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import demo_tokens, describe_head, load_demo_model, remap_distance, where_or_what
from tl_posdisent.experiments import HeadDescription
from tl_posdisent.experiments.where_what import describe_head as describing
from tl_posdisent.experiments.where_what.replacements import CONSTANTS
from tl_posdisent.experiments.where_what.sentences import (
    disagreement_sentence,
    looks_like,
    looks_sentences,
    nats_of_list,
    needs_sentences,
)

IN_BOTH_CLASSES = pytest.mark.parametrize("wrapper", zoo.KINDS)
REFERENCE, TEXTS = by_hand.draw_texts(12, seed=1), by_hand.draw_texts(12, seed=2)
QUIET: dict[str, Any] = {"seeds": 0, "progress": False}


@cache
def wrapped(wrapper: str) -> Any:
    return {"bridge": zoo.as_bridge, "hooked": zoo.as_hooked}[wrapper](by_hand.model())


def label(head: str) -> str:
    return f"L0H{by_hand.HEADS.index(head)}"


def log_predictions(model: Any, texts: Tensor, hooks: Any = ()) -> Tensor:
    with torch.no_grad():
        return model.run_with_hooks(texts, fwd_hooks=list(hooks))[:, :-1].double().log_softmax(-1)


def divergences(model: Any, texts: Tensor, hooks: Any) -> Tensor:
    """KL(unmodified ‖ under hooks) at each position but the last, by torch."""
    clean, changed = log_predictions(model, texts), log_predictions(model, texts, hooks)
    return torch.nn.functional.kl_div(changed, clean, reduction="none", log_target=True).sum(-1)


def mean_output(model: Any, reference: Tensor, head: int) -> list[Any]:
    """Put a head's mean over the reference in its place, but for first tokens, by a plain hook."""
    _, cache = model.run_with_cache(reference, names_filter="blocks.0.attn.hook_z")
    mean = cache["blocks.0.attn.hook_z"][:, 1:, head].mean((0, 1))

    def put(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, 1:, head] = mean
        return z

    return [("blocks.0.attn.hook_z", put)]


# --- needs --------------------------------------------------------------------------------------------------------


@IN_BOTH_CLASSES
@pytest.mark.parametrize("head", by_hand.HEADS)
def test_the_answer_is_that_of_all_heads(wrapper: str, head: str) -> None:
    """And it is what the head was made for; a head that needs both has no verdict of its own."""
    model = wrapped(wrapper)
    found = describe_head(model, REFERENCE, label(head), TEXTS, **QUIET)
    (expected,) = where_or_what(
        model, REFERENCE, TEXTS, heads=[label(head)], exact="all", draws=1, progress=False
    ).to_dict("records")
    assert found.verdict == expected["verdict"]
    assert head in ("both", expected["verdict"])
    (row,) = found.needs.to_dict("records")
    numbers = [x for x in row if x not in ("measured", "verdict", "open")]
    close = rounding(1.0, 100)
    assert [row[x] for x in numbers] == pytest.approx([expected[x] for x in numbers], abs=close, nan_ok=True)
    assert [*row] == [*expected]
    first = repr(found).splitlines()[0]
    assert first == found.answer
    assert first.startswith(f"{label(head)} contributes ")
    assert f": {found.verdict}" in first


@IN_BOTH_CLASSES
@pytest.mark.parametrize("side", ["left", *slow(["right"])])
def test_costs_are_those_of_plain_passes(wrapper: str, side: str) -> None:
    """Of texts of several lengths, each run alone."""
    model, head, lengths = wrapped(wrapper), by_hand.HEADS.index("both"), [40, 64, 40, 23]
    texts = [row[:n] for row, n in zip(TEXTS, lengths, strict=False)]
    ids, mask = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64)
    for row, text in enumerate(texts):
        columns = slice(64 - len(text), 64) if side == "left" else slice(len(text))
        ids[row, columns], mask[row, columns] = text, 1
    found = describe_head(model, REFERENCE, (0, head), {"input_ids": ids, "attention_mask": mask}, **QUIET)

    def mean(hooks: Any) -> float:
        return float(torch.cat([divergences(model, text[None], hooks)[0, 1:] for text in texts]).mean())

    close = rounding(1.0, 10)
    contribution = mean(mean_output(model, REFERENCE, head))
    assert found.needs["contribution"].item() == pytest.approx(contribution, abs=close)
    for distance, cost in zip(CONSTANTS, found.costs, strict=True):
        hooks = remap_distance(model, lambda d, x=distance: torch.where(d == 0, 0.0, x), heads=[(0, head)])
        assert cost.distance == distance
        assert cost.kl == pytest.approx(mean(hooks), abs=close)
        losses = [
            (-changed + clean).gather(-1, text[1:, None])[1:].mean(-1)
            for text in texts
            for clean, changed in [[log_predictions(model, text[None], x)[0] for x in ([], hooks)]]
        ]
        assert cost.loss == pytest.approx(float(torch.cat(losses).mean()), abs=close)


# --- why ----------------------------------------------------------------------------------------------------------


@IN_BOTH_CLASSES
def test_the_query_is_that_of_the_largest_contribution(wrapper: str) -> None:
    model, head = wrapped(wrapper), by_hand.HEADS.index("where")
    example = describe_head(model, REFERENCE, (0, head), TEXTS, **QUIET).example
    by_token = divergences(model, TEXTS, mean_output(model, REFERENCE, head))[:, 1:]
    assert example.contribution == pytest.approx(float(by_token.max()), abs=rounding(1.0, 10))
    assert float(by_token[example.text, example.query - 1]) == pytest.approx(
        example.contribution, abs=rounding(1.0, 10)
    )
    assert example.key == example.query - 1, "for which the head was made"
    assert float(example.attention[example.key]) > 0.99
    assert example.words == tuple(str(i) for i in TEXTS[example.text].tolist())


@IN_BOTH_CLASSES
@pytest.mark.parametrize("head", ["where", "both"])
def test_parts_at_the_query_are_those_of_the_whole_table(wrapper: str, head: str) -> None:
    """Of the query with all keys of the text at all of its distances, each turned by plain rotations."""
    model, number = wrapped(wrapper), by_hand.HEADS.index(head)
    text, query, key = 3, 41, 17
    example = describe_head(model, REFERENCE, (0, number), TEXTS, query=(text, query), key=key, **QUIET).example
    attention = by_hand.model().double().model.layers[0].self_attn
    hidden = by_hand.model().double().model.embed_tokens.weight[TEXTS[text]].detach()  # whose norm changes nothing
    q, k = (
        (hidden @ x.weight.T).view(64, len(by_hand.HEADS), 2, by_hand.PLANES)[:, number].detach()
        for x in (attention.q_proj, attention.k_proj)
    )
    q, k = (torch.complex(x[:, 0], x[:, 1]) for x in (q, k))
    distances = torch.arange(64, dtype=torch.float64)
    turns = torch.polar(torch.ones(64, by_hand.PLANES, dtype=torch.float64), distances[:, None] * by_hand.FREQUENCIES)
    table = torch.einsum("c,kc,dc->kd", q[query], k.conj(), turns).real / by_hand.D_HEAD**0.5
    content, of_distance = table.mean(1), table.mean(0)
    assert example.prefers == int(content[: query + 1].argmax())
    other = example.other
    parts = {
        "content": content[key] - content[other],
        "distance": of_distance[query - key] - of_distance[query - other],
    }
    whole = table[key, query - key] - table[other, query - other]
    parts["rest"] = whole - parts["content"] - parts["distance"]
    close = rounding(table, 100)  # the model normalises in float32
    for name, expected in parts.items():
        assert getattr(example, name) == pytest.approx(float(expected), abs=close), name
    assert example.sources is not None
    assert float(example.sources.scores()) == pytest.approx(float(whole), abs=close)


@IN_BOTH_CLASSES
@pytest.mark.parametrize("head", ["where", "what"])
def test_the_direct_effect_is_that_of_its_weights(wrapper: str, head: str) -> None:
    """Of z, the output projection, the final norm with the scale of the run, and the unembedding."""
    model, number, plain = wrapped(wrapper), by_hand.HEADS.index(head), by_hand.model()
    text, query = 5, 30
    effect = describe_head(model, REFERENCE, (0, number), TEXTS, query=(text, query), **QUIET).example.effect
    assert effect is not None
    _, cache = model.run_with_cache(TEXTS[text][None])
    z = cache["blocks.0.attn.hook_z"][0, query, number].double()
    weight = plain.model.layers[0].self_attn.o_proj.weight.detach().double()
    added = weight.view(by_hand.D_MODEL, len(by_hand.HEADS), by_hand.D_HEAD)[:, number] @ z
    stream = cache["blocks.0.hook_resid_post"][0, query].double()
    size = (stream.square().mean() + plain.config.rms_norm_eps).sqrt()
    gain, unembedding = (x.detach().double() for x in (plain.model.norm.weight, plain.lm_head.weight))
    logits = unembedding @ (gain * added / size)
    with torch.no_grad():
        all_logits = model(TEXTS[text][None])[0, query]
    close = rounding(all_logits, 10)
    torch.testing.assert_close(effect.logits, logits - logits.mean(), rtol=0, atol=close)
    assert float(effect.logits.abs().max()) > 100 * close
    assert effect.next_token == int(TEXTS[text, query + 1])
    assert float(all_logits[effect.likely_token]) == pytest.approx(float(all_logits.max()))


def test_the_last_position_predicts_no_token_of_the_text() -> None:
    example = describe_head(wrapped("bridge"), REFERENCE, (0, 0), TEXTS, query=(1, -1), **QUIET).example
    assert example.query == 63
    assert example.contribution is None
    assert example.effect is not None
    assert example.effect.next_token is None
    assert "next token" not in example.sentences()[-1]


def test_scores_that_cannot_be_split_are_told_in_words(shared_model: Any) -> None:
    """Latent attention has no queries that are a linear function of the stream."""
    model = shared_model("bridge", "deepseek_v3")
    found = describe_head(model, zoo.random_tokens(batch=4), (1, 0), **QUIET)
    assert found.example.sources is None
    assert "The sources of this difference are unknown: score_sources needs" in repr(found)


# --- the result ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> HeadDescription:
    model, tokens = load_demo_model(), demo_tokens(length=384).view(6, 64)
    return describe_head(model, tokens, "L4H2", progress=False)


def test_it_is_read_in_25_lines(found: HeadDescription) -> None:
    lines = repr(found).splitlines()
    assert len(lines) <= 25
    assert lines[0] == found.answer
    assert [line for line in lines if not line.startswith(" ")][1:-1] == ["Needs:", "Looks:", "Why:"]
    assert lines[-1] == f"{found.passes:.1f} forward passes of the measured texts."
    example = found.example
    assert repr(example.words[example.query]) in repr(found)


def test_the_key_that_content_prefers_is_told(found: HeadDescription) -> None:
    example = found.example
    other, own = (replace(example, prefers=key).sentences()[1] for key in (example.other, example.key))
    assert other.startswith("By content, averaged over distances, it prefers ")
    assert own.startswith("Content, averaged over distances, prefers it too: compared with ")
    assert f"{example.words[example.other]!r} (distance {example.query - example.other}, " in other
    assert f"{example.words[example.other]!r} (distance {example.query - example.other}, " in own


def test_notebooks_show_tokens_as_text(found: HeadDescription) -> None:
    words = ("<b>&",) * len(found.example.words)
    shown = replace(found, example=replace(found.example, words=words))._repr_html_()
    assert "<b>&" not in shown.replace("<b>L4H2", "")
    assert "&lt;b&gt;&amp;" in shown


def test_the_table_has_the_numbers(found: HeadDescription) -> None:
    table = found.to_frame()
    assert table.attrs["answer"] == found.answer
    assert [*table["part"].unique()] == ["needs", "looks", "why"]
    values = {(row.part, row.quantity): (row.value, row.se) for row in table.itertuples()}
    assert len(values) == len(table)
    needs = found.needs.iloc[0]
    for name in ("contribution", "what_part", "kept_distance", "gate"):
        assert values["needs", name] == (needs[name], needs[f"{name}_se"])
    cost = found.costs[CONSTANTS.index(5)]
    assert values["needs", "kl at distance 5"] == (cost.kl, cost.kl_se)
    assert values["looks", "share_key"][0] == found.looks.shares["share_key"]
    assert math.isnan(values["looks", "share_key"][1])


def test_figures(found: HeadDescription) -> None:
    plane = found.plot()
    assert isinstance(plane, go.Figure)
    (point,) = [trace for trace in plane.data if trace.name == found.verdict]
    assert plane.layout.title.text == f"What L{found.layer}H{found.head} needs"
    assert point.error_x.array[0] > 0
    profile = found.show()
    assert profile.data[0].y[1] == pytest.approx(found.looks.profile.set_index("distance")["attention"][1])


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"tokens": TEXTS[:1]},
            "tokens must be at least two texts, because errors are over texts, got 1 text: give more",
        ),
        ({"heldout": TEXTS[:1]}, "heldout must be at least two texts"),
        ({"head": 0}, r'head must be a label such as "L8H1" or a pair \(layer, head\), got 0'),
        ({"head": "L0H9"}, "head must be L0H0 to L0H4, as labels or as pairs"),
        ({"key": 3}, r"key must be None without query=\(text, position\), got 3"),
        ({"query": 7}, r"query must be a pair \(text, position\), got 7"),
        ({"query": (12, 3)}, r"query must be an integer from 0 to 11 \(the measured texts\), got 12"),
        ({"query": (0, 64)}, "query must be an integer from -64 to 63"),
        ({"query": (0, 0)}, "query must see two keys or more, got position 0, which sees one"),
        ({"query": (0, 5), "key": 6}, "key must be a position that query 5 sees, got 6"),
        ({"query": (0, 5), "key": 64}, "key must be an integer from -64 to 63, got 64"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_refusals(changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them before the runs."""
    monkeypatch.setattr(describing, "measure_head", Mock(side_effect=AssertionError))
    arguments = {"tokens": TEXTS, "head": "L0H1"} | changed
    with pytest.raises(ValueError, match=f"^{message}"):
        describe_head(wrapped("bridge"), **arguments, **QUIET)


# --- sentences ----------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {
    **{"layer": 8, "head": 1, "contribution": 0.0111, "where_part": 0.295, "what_part": 0.705, "neither_part": 0.0},
    **{"kept_distance": -0.4, "kept_content": 0.41, "kept_uniform": 0.0, "gate": 0.1, "joint": 0.59},
    **{"content_distance": 5, "measured": "run", "verdict": "mixed", "open": ""},
}
ROW |= {f"{name}_se": 0.02 for name in ROW} | {"contribution_se": 0.0023, "kept_distance_se": 0.1}


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, "L8H1 contributes 0.011 ± 0.002 nats per predicted token: 30 ± 2 % where, 70 ± 2 % what, 0 ± 2 % neither"),
        ({}, " neither: mixed."),
        ({"verdict": "what"}, " neither: what."),
        ({"verdict": "what", "what_part": 0.4, "neither_part": 0.41}, " neither: more what than where."),
        ({"verdict": "undecided", "open": "more texts"}, " neither: undecided, more texts may decide."),
        ({"verdict": "undecided", "open": "neither or what"}, " neither: undecided, neither or what."),
        ({"what_part": 0.9843, "what_part_se": 0.004}, "98.4 ± 0.4 % what"),
        (
            {"verdict": "not used", "contribution": 2.5e-5},
            "contributes 0.000025 ± 0.002 nats per predicted token, which is negligible: not used.",
        ),
        ({"measured": "estimated"}, "L8H1 contributes an estimated 0.011 ± 0.002 nats per predicted token: "),
        ({"group": "sinks", "heads": "L8H1, L9H2"}, "sinks (L8H1, L9H2) contributes 0.011 ± 0.002 nats"),
        ({"group": "many", "heads": ", ".join(f"L8H{n}" for n in range(5))}, "many (5 heads) contributes 0.011"),
    ],
    ids=lambda x: "" if isinstance(x, str) else ", ".join(x) or "as it is",
)
def test_answers(changed: dict[str, Any], answer: str) -> None:
    assert answer in needs_sentences(ROW | changed)[0]


def test_what_is_kept_is_told() -> None:
    (said,) = needs_sentences(ROW)[1:2]
    assert said == (
        "Distances alone keep none of it, content alone 41 ± 2 %, uniform attention 0 ± 2 % (joint 0.59 ± 0.02: "
        "position and content are needed together); its own attention to the first token and uniform attention to the "
        "rest keep 10 ± 2 %."
    )
    assert "(joint −0.50 ± 0.02: either position or content serves)" in needs_sentences(ROW | {"joint": -0.5})[1]
    assert "joint" not in needs_sentences(ROW | {"joint": 0.03})[1]
    assert "joint" not in needs_sentences(ROW | {"joint": 0.2}, df=1)[1]  # two texts: a t-interval of 12.7 errors
    assert needs_sentences(ROW | {"verdict": "not used"}) == [needs_sentences(ROW | {"verdict": "not used"})[0]]


def test_harm_is_told_where_a_cost_exceeds_the_contribution() -> None:
    assert needs_sentences(ROW | {"kept_content": -15.0})[2:] == [
        "Attention by the distance alone costs 0.02 and every other key at distance 5 costs 0.18, each more than the "
        "head contributes: wrong attention does harm."
    ]
    assert needs_sentences(ROW, df=1)[2:] == []
    harmless = ROW | {"kept_distance": -0.1}
    assert needs_sentences(harmless)[2:] == []
    assert needs_sentences(harmless | {"kept_content": -1.0})[2:] == [
        "Every other key at distance 5 costs 0.022, more than the head contributes: wrong attention does harm."
    ]
    assert needs_sentences(ROW | {"verdict": "not used", "kept_content": -1.0})[1:] == []


@pytest.mark.parametrize("values", [[0.1134, 0.1, 0.152], [12.3, 0.1, 0.0], [0.0996, 0.1], [-0.02, 3e-7, 1.0], [0.0]])
def test_numbers_of_a_list_have_the_same_number_of_decimals(values: list[float]) -> None:
    """The largest has two significant digits at least, and no number but 0 is written as 0 within six decimals."""
    words = nats_of_list(values, sign="+")
    (decimals,) = {len(word.partition(".")[2]) for word in words}
    assert all(word[0] in "+−" for word in words)
    found = [float(word.replace("−", "-")) for word in words]
    assert found == [round(value, decimals) for value in values]
    assert max(map(abs, found)) == 0 or 10**-decimals <= max(map(abs, found)) / 10 or decimals == 6
    assert [x == 0 for x in found] == [round(x, 6) == 0 for x in values]


SHARES = {"share_distance": 0.6, "share_key": 0.1, "share_query": 0.2, "r": 0.9}


def test_scores_look_like_what_differs_from_random_weights() -> None:
    assert looks_like(SHARES) == "where"
    assert looks_like(SHARES, SHARES | {"share_key": 0.6}) == "where"
    assert looks_like(SHARES, SHARES) is None
    assert looks_like(SHARES | {"share_key": 0.9}) == "what"
    assert looks_like(SHARES | {"share_key": 0.55}) is None


@pytest.mark.parametrize("verdict", ["what", "mixed", "neither", "not used"])
def test_a_disagreement_is_told(verdict: str) -> None:
    said = disagreement_sentence({"verdict": verdict}, SHARES)
    assert said is not None
    assert said.startswith(
        "Its scores look like where (the distance explains 60 % of their variance, the key 10 %), but"
    )
    assert disagreement_sentence({"verdict": verdict}, SHARES, SHARES) is None


@pytest.mark.parametrize("verdict", ["where", "undecided"])
def test_agreement_is_silent(verdict: str) -> None:
    assert disagreement_sentence({"verdict": verdict}, SHARES) is None


def test_scores_that_do_not_vary() -> None:
    nothing = dict.fromkeys(SHARES, math.nan)
    assert looks_sentences(nothing, label="") == ["Its scores do not vary.", "Usual label: none."]
    assert looks_like(nothing) is None
    assert (
        looks_sentences(pd.Series(SHARES), profile={}, first_token=0.5)[-1]
        == "The first token gets 50 % of its attention."
    )
