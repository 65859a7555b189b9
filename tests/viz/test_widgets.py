"""Widgets without a browser: the numbers that a page carries, and that nothing is fetched."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch
from circuitsvis.utils.render import RenderedHTML
from hypothesis import example, given
from hypothesis import strategies as st
from support import zoo

import tl_posdisent as tp
from tl_posdisent.viz.widgets import charts
from tl_posdisent.viz.widgets import selection as choice
from tl_posdisent.viz.widgets.charts import Widget

WORDS = [f" {word}" for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"]]
N = len(WORDS)
PARTS = ("fitted", "distance", "query", "key", "scores", "residual")


def data(widget: Widget) -> dict[str, Any]:
    """What circuitsvis hands to its chart."""
    return json.loads(str(widget).rsplit("CircuitsVis.render(", 1)[1].split(",", 2)[2].rsplit("}", 1)[0] + "}")


def matrices(widget: Widget) -> torch.Tensor:
    """``[matrix, query, key]``, or ``[token]``."""
    props = data(widget)
    return torch.tensor(props["values" if "values" in props else "attention"], dtype=torch.float64)


def by_name(widget: Widget) -> dict[str, torch.Tensor]:
    return dict(zip(data(widget)["attentionHeadNames"], matrices(widget), strict=True))


def random_scores(*batch: int, length: int = N, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*batch, length, length, generator=torch.Generator().manual_seed(seed)) + 2


def near(a: torch.Tensor, b: torch.Tensor, scale: float) -> bool:
    """Equal to the fourth digit of the scale."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 0.00051 * scale * 1.01)


def band() -> torch.Tensor:
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return (distance >= 0) & (distance < 3)


def holes() -> torch.Tensor:
    mask = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    mask[0, :, 5, 2] = mask[1, :, 7, 0] = False
    return mask


FITS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"mask": "full"},
    "window": {"window": 3},
    "pooled": {"pool": True},
    "band": {"mask": band()},
    "holes": {"mask": holes()},
}


# --- the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("part", PARTS)
def test_components_are_those_of_the_fit(part: str, kind: str) -> None:
    scores = random_scores(2, 3)
    fit = tp.fit_additive(scores, **FITS[kind])
    heads, positions = [2, 0], [0, 1, 4, 5, 7]
    inside = fit.mask.expand(scores.shape)
    full = {
        "fitted": lambda: fit.fitted(),
        "scores": lambda: torch.where(inside, scores.double(), 0.0),
        "residual": lambda: fit.residual(scores),
    }.get(part, lambda: fit.component(part))()
    expected = full[1, heads][:, positions][:, :, positions]
    widget = tp.show_scores(
        fit, WORDS, part, scores=scores, heads=heads, text=1, positions=positions, centred=False, scale=20.0
    )
    assert near(matrices(widget), expected, 20.0)
    props = data(widget)
    assert props["attentionHeadNames"] == ["H2", "H0"]
    assert props["tokens"] == [f"·{WORDS[i].strip()}@{i}" for i in positions]
    assert (props["maxValue"], props["minValue"]) == (20.0, -20.0)
    assert props["maskUpperTri"] is (kind != "full")


def test_side_by_side_they_add_up() -> None:
    scores = random_scores(2)
    widget = tp.show_parts(tp.fit_additive(scores), WORDS, 1, scores=scores)
    shown = by_name(widget)
    assert list(shown) == ["scores", "fitted", "residual", "distance", "query", "key"]
    scale = data(widget)["maxValue"]
    assert near(shown["distance"] + shown["query"] + shown["key"], shown["fitted"], 4 * scale)
    assert near(shown["fitted"] + shown["residual"], shown["scores"], 3 * scale)
    mean = scores[1].double()[torch.ones(N, N).tril().bool()].mean()
    assert near(shown["scores"] + mean * torch.ones(N, N).tril(), scores[1].double().tril(), scale)
    largest = torch.stack([x[:, 1:].abs().max() for x in shown.values()]).max()
    assert near(largest, torch.tensor(scale).double(), scale)  # the first key, often a sink, is apart
    later = tp.show_parts(tp.fit_additive(scores), WORDS, 1, scores=scores, positions=range(2, 6))
    largest = max(x[2:6, 2:6].abs().max() for x in shown.values())
    assert near(torch.tensor(data(later)["maxValue"]).double(), largest, scale)
    assert data(tp.show_parts(tp.fit_additive(scores), WORDS, 1, scale=7.0))["maxValue"] == 7


def test_titles_say_layer_and_head_and_a_layer_is_chosen() -> None:
    scores, several = random_scores(2, 3, 4), (5, 6, 9)
    fits = {layer: tp.fit_additive(scores[:, n]) for n, layer in enumerate(several)}
    fit = replace(tp.fit_additive(scores), layers=several)
    own = scores.masked_fill(~fit.mask, -torch.inf).softmax(-1)
    both: Any
    for both in (
        lambda fit, x, _: tp.show_scores(fit, WORDS, "residual", scores=x, layer=6, text=1, heads=[2, 0]),
        lambda fit, x, _: tp.show_parts(fit, WORDS, 3, scores=x, layer=6, text=1),
        lambda fit, _, p: tp.show_patterns(fit, WORDS, p, layer=6, text=1),
    ):
        one, another = both(fit, scores, own), both(fits[6], scores[:, 1], own[:, 1])
        assert torch.allclose(matrices(one), matrices(another), atol=1e-3)
        assert one.title == another.title
        assert one.title.startswith(("Layer 6: ", "L6H3: "))
    assert data(tp.show_scores(fit, WORDS, layer=9))["attentionHeadNames"][1] == "L9H1"
    assert tp.show_scores(fits[5], WORDS, heads=[3]).title == "Head 3: the fitted scores"
    assert tp.show_scores(fits[5], WORDS).title == "The fitted scores"
    for wrong in (None, 7):
        with pytest.raises(ValueError, match=f"layer must be one of the fit's, 5, 6, 9, got {wrong}"):
            tp.show_scores(fit, WORDS, layer=wrong)
    with pytest.raises(ValueError, match="layer must be an integer"):
        tp.show_scores(fits[5], WORDS, layer=-1)


@pytest.mark.parametrize("kind", FITS)
def test_additive_pattern_is_the_softmax_of_the_fit(kind: str) -> None:
    scores = random_scores(2, 3)
    fit = tp.fit_additive(scores, **FITS[kind])
    own = scores.masked_fill(~fit.mask, -torch.inf).softmax(-1)
    positions = [1, 2, 6]
    widget = tp.show_patterns(fit, WORDS, own, text=1, positions=positions)
    expected = torch.stack([own.double()[1], fit.fitted(fill=-torch.inf).softmax(-1)[1]], 1)
    assert data(widget)["attentionHeadNames"] == [f"H{n} {name}" for n in range(3) for name in ("model", "additive")]
    assert near(matrices(widget), expected[:, :, positions][..., positions].flatten(0, 1), 1.0)


def test_a_query_that_sees_nothing_has_no_pattern() -> None:
    mask = torch.ones(N, N).tril().bool()
    mask[3] = False
    scores = random_scores(1)
    fit = tp.fit_additive(scores, mask=mask)
    own = scores.masked_fill(~mask, -torch.inf).softmax(-1)  # NaN in its row, as in some models
    assert matrices(tp.show_patterns(fit, WORDS, own))[:, 3].abs().max() == 0


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_loss_added_to_each_token(kind: str, name: str, shared_model: Any) -> None:
    model, tokens = shared_model(kind, name), zoo.random_tokens(length=N, batch=2)
    hooks = tp.dummy_distance(model, 3)
    with torch.no_grad():
        runs = [model(tokens[1:]).double(), model.run_with_hooks(tokens[1:], fwd_hooks=hooks).double()]
    before, after = (torch.nn.functional.cross_entropy(x[0, :-1], tokens[1, 1:], reduction="none") for x in runs)
    widget = tp.viz.show_loss_change(model, tokens, hooks, text=1)
    expected = torch.cat([torch.zeros(1), after - before])
    assert near(matrices(widget), expected, float(expected.abs().max()))
    assert data(widget)["minValue"] == pytest.approx(-expected[1:].abs().max().item())
    assert expected.abs().max() > 1e-3
    assert f"{(after - before).mean():+.3f} on average" in str(widget)
    with pytest.raises(ValueError, match="text must be an integer from 0 to 1, got 2"):
        tp.viz.show_loss_change(model, tokens, hooks, text=2)


def test_fewer_queries_than_keys() -> None:
    fit = tp.fit_additive(random_scores(2)[:, -3:], check=False)
    with pytest.raises(ValueError, match="must be square, as a whole text's are, got 3 queries × 8 keys"):
        tp.show_scores(fit, WORDS)


def test_only_what_is_shown_is_computed() -> None:
    """All cells of this fit would take 300 GB."""
    length = 60_000
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, 2, 4, generator=generator) for _ in range(2))
    fit = tp.fit_additive_qk(q, k, scale=0.5)
    widget = tp.show_scores(fit, [" a"] * length, "key", positions=range(1000, 1004))
    at = fit.key[0, :, 1000:1004]
    expected = at[:, None, :].expand(2, 4, 4).tril()
    assert near(matrices(widget), expected, data(widget)["maxValue"])


def test_scores_that_do_not_vary_have_a_scale() -> None:
    """circuitsvis divides by it."""
    widget = tp.show_scores(tp.fit_additive(torch.zeros(1, N, N)), WORDS)
    assert data(widget)["maxValue"] == 1e-9
    assert matrices(widget).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_masked_cells_may_hold_anything(dtype: torch.dtype) -> None:
    scores = random_scores(2).to(dtype)
    upper = torch.ones(N, N).triu(1).bool()
    masked = scores.masked_fill(upper, -torch.inf)
    widgets = [tp.show_parts(tp.fit_additive(x), WORDS, 0, scores=x) for x in (scores, masked)]
    assert torch.equal(*map(matrices, widgets))
    assert matrices(widgets[0])[..., upper].abs().max() == 0


# --- interventions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["pattern", "scores"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_before_and_after_are_the_models_own(kind: str, name: str, what: Any, shared_model: Any) -> None:
    model, tokens, layer = shared_model(kind, name), zoo.random_tokens(), 1
    hooks = tp.swap_positions(model, torch.arange(12).flip(0))
    spec = tp.read_model(model).specs(layer)[0]
    tap = {"pattern": spec.taps.pattern, "scores": spec.taps.scores}[what]
    seen: list[torch.Tensor] = []
    inside = spec.mask(12)
    for active in ([], hooks):
        with torch.no_grad(), model.hooks(fwd_hooks=[*active, (tap, lambda x, hook: seen.append(x.double()))]):
            model(tokens)
    before, after = (torch.where(inside, x[1], 0.0) for x in seen)
    widget = tp.show_interventions(model, tokens, hooks, layer=layer, what=what, text=1)
    scale = data(widget)["maxValue"]
    assert near(matrices(widget), torch.stack([before, after, after - before], 1).flatten(0, 1), scale)
    assert (after - before).abs().max() > 0.01 * scale
    assert data(widget)["tokens"] == [str(i) for i in tokens[1].tolist()]


def test_interventions_that_a_pattern_would_not_show(shared_model: Any) -> None:
    name = next(name for name in zoo.BRIDGE_NAMES if not _editable(shared_model("bridge", name)))
    model = shared_model("bridge", name)
    tokens, hooks = zoo.random_tokens(), tp.ablate_heads(model, [(0, 0)])
    with pytest.raises(ValueError, match="discards edited scores"):
        tp.show_interventions(model, tokens, hooks, layer=0)


def _editable(model: Any) -> bool:
    return tp.read_model(model).specs(0)[0].taps.scores is not None


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("charts", [1, 3])
@pytest.mark.parametrize(("n_heads", "length"), [(8, 512), (32, 128), (1, 700), (12, 60), (40, 64), (3, 4000)])
def test_what_is_suggested_is_allowed(n_heads: int, length: int, charts: int) -> None:
    options = choice.Options(None, 0, None, None, None)

    def attempt(**changed: Any) -> None:
        shape = (n_heads, length, length)
        choice.choose(shape, ["a"] * length, replace(options, **changed), charts=charts)

    cells = (n_heads * charts + 1) * length**2
    if cells <= choice.CELLS:
        return attempt()
    with pytest.raises(ValueError, match=f"heads and positions must be fewer: .* are {cells} cells") as refusal:
        attempt()
    for way in str(refusal.value).split("for instance ")[1].split(" or "):
        attempt(**eval(f"dict({way})"))
    return None


# --- the page -----------------------------------------------------------------------------------------------


def test_nothing_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """circuitsvis's own asks google.com whether there is one, at every display."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    library = (resources.files("circuitsvis") / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    fit = tp.fit_additive(random_scores(2))
    widget = tp.show_scores(fit, WORDS)
    assert isinstance(widget, RenderedHTML)
    for page in (str(widget), widget.show_code(), widget._repr_html_(), widget.__html__()):
        assert "unpkg.com" not in page
        assert page.count(library[:100_000]) == 1
        assert page.isascii()  # a file of it needs no declared encoding


def test_a_title_that_is_a_script_is_text() -> None:
    evil = "</script><script>alert(1)</script>"
    assert evil not in str(tp.show_scores(tp.fit_additive(random_scores(2)), WORDS, title=evil))


@given(st.text(st.characters(), max_size=12))
@example("λόγος日本naïve🙂<|endoftext|>Ġcat")
def test_tokens_are_visible_and_harmless(token: str) -> None:
    """Nothing begins markup, whether in a script or in HTML."""
    for shown in (charts.axis_token(token), charts.text_token(token)):
        seen = shown.replace("\u2060", "").removesuffix("\n")
        assert seen
        assert seen.isprintable()
        assert " " not in seen
        assert not re.search(r"[<&](?!\u2060)", shown)
    assert len(charts.axis_token(token).replace("\u2060", "")) <= 24
    plain = token.isprintable() and token and not set(token) & set(" \u2060")
    assert not plain or seen == token
