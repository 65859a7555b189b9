"""Laws of interventions on a trained language model, SmolLM2-135M: 30 layers of 9 heads, 3 of them of keys."""

from __future__ import annotations

import gzip
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.edited_scores import Call, Layer, edited_results
from support.intervention_cases import hooks_of
from support.packaged_models import packaged_model
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    capture,
    controlled_distance,
    load_model,
    read_model,
    swap_positions,
)
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import joined
from tl_posdisent.models.loading.packaged import PACKAGED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]
TEXT = (
    "The committee that the president appointed in March met again on Tuesday, and the president thanked the committee."
)


@pytest.fixture(scope="module")
def model() -> Any:
    return packaged_model("smollm2")


@pytest.fixture(scope="module")
def tokens(model: Any) -> Tensor:
    return torch.cat([model.to_tokens(TEXT)] * 2, 1)


def logits(model: Any, tokens: Tensor, hooks: Any = (), **given: Any) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens, **given)


def test_it_is_the_trained_model(model: Any) -> None:
    assert PACKAGED["smollm2"].size == (model.cfg.n_layers, model.cfg.n_heads)
    assert (
        model.tokenizer.decode(logits(model, model.to_tokens("The capital of France is"))[0, -1].argmax()) == " Paris"
    )
    folder = Path(os.environ.get("POSDISENT_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (folder / "wikitext2-test.txt.gz").is_file():
        pytest.skip("needs wikitext2-test.txt.gz (POSDISENT_DATA names the folder)")
    text = gzip.decompress((folder / "wikitext2-test.txt.gz").read_bytes()).decode("utf-8")
    ids = model.to_tokens(text[:10_000], prepend_bos=False, truncate=False)[:, :1024]
    loss = torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:])
    assert float(loss) == pytest.approx(2.39, abs=0.01)


def test_positions_are_position_ids(model: Any, tokens: Tensor) -> None:
    n = tokens.shape[1]
    places = torch.randperm(3 * n, generator=torch.Generator().manual_seed(0))[None, :n]
    ones = torch.ones_like(tokens)
    with torch.no_grad():
        expected = model.original_model(tokens, position_ids=places, attention_mask=ones, use_cache=False).logits
    got = logits(model, tokens, swap_positions(model, places))
    assert (expected - logits(model, tokens)).abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)


EDITS = {
    "dummy": [Call("dummy_distance", distance=5)],
    "ceiling": [Call("remap_distance", distances=lambda d: d.clamp(max=16))],
    "any function": [Call("remap_distance", distances=lambda d: d.sqrt())],
    "lambda": [Call("lambda_mask", sinks=2, window=12, distance_ceiling=8)],
    "two": [
        Call("swap_positions", positions=lambda p: p // 2),
        Call("limit_frequencies", low=0.02, mode="freeze"),
    ],
    "three": [
        Call("position_interpolation", factor=2),
        Call("phase_noise", noise=0.3),
        Call("drop_component", component="key"),
    ],
}


def under(edit: str, model: Any, layers: Any = None, heads: Any = None) -> Any:
    return joined(hooks_of(model, call.on(heads), layers) for call in EDITS[edit])


@pytest.mark.parametrize(("layer", "edit"), [(0, "two"), *((18, edit) for edit in EDITS)])
def test_heads_under_edits_are_the_oracles(layer: int, edit: str, model: Any, tokens: Tensor) -> None:
    """Some heads of each group of keys; layer 18 has strong attention sinks."""
    seen = capture(model, tokens, layers=[layer])[0]
    v, z = f"blocks.{layer}.attn.hook_v", f"blocks.{layer}.attn.hook_z"
    heads, others = [1, 4, 5], [0, 2, 3, 6, 7, 8]
    hooks = under(edit, model, [layer], heads)
    with torch.no_grad():
        plain = model.run_with_cache(tokens, names_filter=[v, z])[1]
        with model.hooks(fwd_hooks=hooks):
            got = model.run_with_cache(tokens, names_filter=z)[1][z].transpose(1, 2)
    calls = [call.on(heads) for call in EDITS[edit]]
    expected = edited_results(Layer(seen.spec, seen.q, seen.k, plain[v]), calls).float()
    torch.testing.assert_close(got[:, heads], expected[:, heads], rtol=0, atol=2e-4 * float(expected.abs().max()))
    assert torch.equal(got[:, others], plain[z].transpose(1, 2)[:, others])


@pytest.mark.parametrize("edit", ["dummy", "ceiling"])
def test_padding(edit: str, model: Any, tokens: Tensor) -> None:
    text, hooks = tokens[:, :12], under(edit, model)
    whole = logits(model, text, hooks)
    padded = torch.cat([torch.zeros_like(text[:, :4]), text], 1)
    mask = torch.cat([torch.zeros_like(text[:, :4]), torch.ones_like(text)], 1)
    both, masks = torch.cat([padded, tokens[:, :16]]), torch.cat([mask, torch.ones_like(mask)])
    together = logits(model, both, hooks, attention_mask=masks)
    torch.testing.assert_close(together[:1, 4:], whole, rtol=0, atol=2e-3)
    torch.testing.assert_close(together[1:], logits(model, tokens[:, :16], hooks), rtol=0, atol=2e-3)


def test_controlled_distance_by_brute_force(model: Any, tokens: Tensor) -> None:
    """All scores of layer 16 at ten distances, in complex numbers, and the variance of their means."""
    spec, distances = read_model(model).specs(16)[0], range(10)
    seen = capture(model, tokens, layers=[16], scores=False)[0]
    table = controlled_distance(model, tokens, layers=[16], distances=distances, progress=False)
    q, k = seen.q.double()[0], seen.k.double()[0].repeat_interleave(3, 1)
    zq, zk = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    turn = torch.exp(1j * torch.arange(10.0).double()[:, None] * spec.rotary.frequencies)
    scores = torch.einsum("ihc,jhc,dc->hdij", zq, zk.conj(), turn).real * spec.scale
    mean = scores.mean((1, 2, 3), keepdim=True)
    d, i, j = (scores.mean(axes, keepdim=True) - mean for axes in ((2, 3), (1, 3), (1, 2)))
    total = (scores - mean).square().mean((1, 2, 3))
    shares = [x.square().mean((1, 2, 3)) / total for x in (d, i, j)]
    for name, share in zip(("distance", "query", "key"), shares, strict=True):
        assert table[name].tolist() == pytest.approx(share.tolist(), abs=1e-7)
    assert table["r_three_axis"].tolist() == pytest.approx(sum(shares).sqrt().tolist(), abs=1e-7)


@zoo.needs_hooked
def test_both_classes_agree_under_hooks(model: Any, tokens: Tensor) -> None:
    other = load_model("smollm2", backend="hooked")
    ablated = partial(ablate_heads, heads=["L16H0", "L18H6"])
    for make in (lambda m: [], partial(under, "dummy"), partial(under, "lambda"), ablated):
        found, expected = logits(other, tokens, make(other)), logits(model, tokens, make(model))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def test_sixteen_bits(tokens: Tensor) -> None:
    narrow = load_model("smollm2", backend="bridge", dtype=torch.bfloat16)
    plain = logits(narrow, tokens)
    n = tokens.shape[1]
    assert torch.equal(logits(narrow, tokens, swap_positions(narrow, torch.arange(n))), plain)
    for edit in ("ceiling", "three"):
        assert bool(logits(narrow, tokens, under(edit, narrow)).isfinite().all())
    without = logits(narrow, tokens, ablate_heads(narrow, None))  # late layers, too, whose effect is near the rounding
    with torch.no_grad():
        for block in narrow.blocks:
            block.attn.o.weight.zero_()
    assert torch.equal(logits(narrow, tokens), without)
    assert not torch.equal(plain, without)
