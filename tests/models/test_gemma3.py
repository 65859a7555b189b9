"""Laws of interventions on a trained model whose layers differ, Gemma 3 270M: 18 layers of 4 heads with one key head,
five with a window of 512 tokens to each that sees the whole text, with another rotary base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.edited_scores import Call, Layer, edited_results
from support.intervention_cases import hooks_of
from support.packaged_models import packaged_model
from torch import Tensor

from tl_posdisent import (
    additivity,
    capture,
    demo_text,
    fit_additive,
    read_model,
    swap_positions,
)
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import joined
from tl_posdisent.models.loading.packaged import PACKAGED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]
LOCAL, GLOBAL = 4, 5
EDITS = {
    "lambda": [Call("lambda_mask", sinks=2, window=12, distance_ceiling=8)],
    "two": [
        Call("swap_positions", positions=lambda p: p // 2),
        Call("limit_frequencies", low=0.02, mode="freeze"),
    ],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return packaged_model("gemma3-270m")


@pytest.fixture(scope="module")
def tokens(model: Any) -> Tensor:
    return model.to_tokens(demo_text())[:, :40]


def test_what_it_is(model: Any, tokens: Tensor) -> None:
    """The loss of a trained model, its published scale, and which layers have a window and which base."""
    with torch.no_grad():
        logits = model(model.to_tokens(demo_text())[:, :256])
    ids = model.to_tokens(demo_text())[0, 1:256]
    assert float(torch.nn.functional.cross_entropy(logits[0, :-1], ids)) == pytest.approx(2.59, abs=0.01)
    specs = read_model(model).specs()
    assert PACKAGED["gemma3-270m"].size == (len(specs), specs[0].n_heads)
    assert [n for n, spec in enumerate(specs) if spec.window is None] == [GLOBAL, 11, 17]
    assert {spec.window for spec in specs} == {512, None}
    assert read_model(model).specs("global") == [specs[n] for n in (GLOBAL, 11, 17)]
    assert len(read_model(model).specs("local")) == 15
    for layer, base in ((LOCAL, 1e4), (GLOBAL, 1e6)):
        assert specs[layer].rotary.frequencies[1].item() == pytest.approx(base ** (-2 / 256), rel=1e-5)


def test_positions_are_position_ids_beyond_the_window(model: Any) -> None:
    text = model.to_tokens(demo_text() * 2, truncate=False)[:, :530]
    places = torch.arange(530)[None] + 40 * (torch.arange(530)[None] > 300)
    arguments = {"attention_mask": torch.ones_like(text), "use_cache": False, "logits_to_keep": 40}
    with torch.no_grad():
        expected = model.original_model(text, position_ids=places, **arguments).logits
        plain = model.original_model(text, **arguments).logits
        with applied(model, swap_positions(model, places)):
            got = model.original_model(text, **arguments).logits
    assert (expected - plain).abs().max() > 0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("edit", EDITS)
def test_heads_under_edits_are_the_oracles(edit: str, model: Any, tokens: Tensor) -> None:
    """Two of four heads of a local and of a global layer at once."""
    heads, others = [1, 3], [0, 2]
    places = {layer: (f"blocks.{layer}.attn.hook_v", f"blocks.{layer}.attn.hook_z") for layer in (LOCAL, GLOBAL)}
    calls = [call.on(heads) for call in EDITS[edit]]
    hooks = joined(hooks_of(model, call, [GLOBAL]) for call in calls)
    both = joined(hooks_of(model, call, [LOCAL, GLOBAL]) for call in calls)
    for layer, installed in ((GLOBAL, hooks), (LOCAL, both)):
        v, z = places[layer]
        seen = capture(model, tokens, layers=[layer])[0]
        with torch.no_grad():
            plain = model.run_with_cache(tokens, names_filter=[v, z])[1]
            with model.hooks(fwd_hooks=installed):
                got = model.run_with_cache(tokens, names_filter=z)[1][z].transpose(1, 2)
        expected = edited_results(Layer(seen.spec, seen.q, seen.k, plain[v]), calls).float()
        atol = 2e-4 * float(expected.abs().max())
        torch.testing.assert_close(got[:, heads], expected[:, heads], rtol=0, atol=atol)
        assert torch.equal(got[:, others], plain[z].transpose(1, 2)[:, others])


def test_additivity_counts_the_cells_within_the_window(model: Any) -> None:
    """Least squares: the residuals of these cells sum to 0 over each distance, each query and each key."""
    text, place = model.to_tokens(demo_text() * 2, truncate=False)[:, :600], torch.arange(600)
    table = additivity(model, text, layers=[LOCAL, GLOBAL], progress=False).set_index("layer")["r"]
    query, key = place[:, None].expand(600, 600), place.expand(600, 600)
    for layer, window, base in ((LOCAL, 512, 1e4), (GLOBAL, 600, 1e6)):
        q, k = _plain_queries_and_keys(model, text, layer)
        scores = torch.einsum("ihc,jgc->hij", _turned(q, base), _turned(k, base).conj()).real / 16
        cells = (query >= key) & (query - key < window)
        fitted = fit_additive(scores, mask=cells).fitted()
        residual = scores[:, cells] - fitted[:, cells]
        for index in (query - key, query, key):
            sums = torch.zeros(4, 600, dtype=torch.float64).index_add_(1, index[cells], residual)
            assert sums.abs().max() < 1e-5 * scores[:, cells].abs().max()
        r = [
            torch.corrcoef(torch.stack(pair))[0, 1].item()
            for pair in zip(scores[:, cells], fitted[:, cells], strict=True)
        ]
        assert table[layer].tolist() == pytest.approx(r, abs=1e-5)


def _plain_queries_and_keys(model: Any, text: Tensor, layer: int) -> list[Tensor]:
    """``[pos, head, d_head]`` of the norms of queries and keys, in float64."""
    attention, seen = model.original_model.model.layers[layer].self_attn, []
    handles = [
        norm.register_forward_hook(lambda _, __, out: seen.append(out[0].transpose(0, 1).double()))
        for norm in (attention.q_norm, attention.k_norm)
    ]
    with torch.no_grad():
        model.original_model(text, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return seen


def _frequencies(base: float) -> Tensor:
    return base ** (-torch.arange(128).double() / 128)


def _turned(x: Tensor, base: float) -> Tensor:
    """Vectors ``[pos, head, 256]`` as complex numbers ``[pos, head, 128]``, rotated by their positions."""
    angles = torch.arange(len(x))[:, None] * _frequencies(base)
    return torch.complex(x[..., :128], x[..., 128:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
