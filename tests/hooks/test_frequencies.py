"""A band of RoPE's frequencies: against brute force over subspaces, and by what bands must do together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L, close, every_way, logits, mixed_of
from support.untouched import state
from torch import Tensor

from tl_posdisent import capture, dummy_distance, limit_frequencies, read_attention
from tl_posdisent.hooks import applied

HEADS = {"all": None, "a group": [2, 3], "some of groups": [6, 1]}
pytestmark = pytest.mark.usefixtures("unchecked")


def cut(model: Any, layer: int = 0) -> float:
    """A frequency between the fastest of a layer and the next, or below the only one."""
    frequencies = read_attention(model, layer).rotary.frequencies.sort(descending=True).values.tolist()
    return math.sqrt(frequencies[0] * frequencies[1]) if len(frequencies) > 1 else frequencies[0] / 2


def term_by_term(model: Any, low: float, high: float, mode: str, layer: int = 0) -> tuple[Tensor, Any]:
    """Scores ``[batch, head, query, key]`` before soft cap, in float64: one subspace after the other."""
    captured = next(iter(list(capture(model, TOKENS, layers=[layer]))))
    spec, rotary = captured.spec, captured.spec.rotary
    q, k = captured.q.double(), captured.k.double()
    k = k.repeat_interleave(spec.n_heads // k.shape[2], 2)
    n = len(rotary.frequencies)
    rest = slice(2 * n, None)
    scores = torch.einsum("bqhd,bkhd->bhqk", q[..., rest], k[..., rest])
    distance = (torch.arange(L)[:, None] - torch.arange(L)).double()
    for c, theta in enumerate(rotary.frequencies.tolist()):
        x, y = (c, c + n) if rotary.pairing == "half" else (2 * c, 2 * c + 1)
        zq, zk = (torch.complex(v[..., x], v[..., y]).transpose(1, 2) for v in (q, k))
        kept = low <= theta <= high
        turn = torch.exp(1j * theta * distance * (1 if kept else 0))
        if kept or mode == "freeze":
            scores = scores + (zq[..., :, None] * zk.conj()[..., None, :] * turn).real * rotary.attention_factor**2
    return scores * spec.scale, spec


def taken_along(model: Any, scores: Tensor, spec: Any, layer: int = 0) -> Tensor:
    """``[batch, head, pos, d_head]`` by these scores, as the layer goes on with them."""
    name = f"blocks.{layer}.attn.hook_v"
    with torch.no_grad():
        values = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
    values = values.repeat_interleave(spec.n_heads // values.shape[2], 2)
    scores = spec.capped(scores).masked_fill(~spec.mask(L), -torch.inf)
    attention = model.blocks[layer].attn
    sinks = getattr(getattr(attention, "original_component", attention), "sinks", None)
    if sinks is not None:
        scores = torch.cat([scores, sinks.detach().double()[:, None, None].expand(2, spec.n_heads, L, 1)], -1)
    return torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1)[..., :L], values).float()


@every_way
@pytest.mark.parametrize("mode", ["drop", "freeze"])
def test_brute_force_over_subspaces(kind: str, name: str, mode: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, middle = mixed_of(model, []), cut(model)
    low, high = (middle, None) if mode == "drop" else (None, middle)
    scores, spec = term_by_term(model, low or 0, high or math.inf, mode)
    expected = taken_along(model, scores, spec)
    assert (expected - plain).abs().max() > 0.05
    for which, heads in HEADS.items():
        got = mixed_of(model, limit_frequencies(model, low, high, mode=mode, layers=[0], heads=heads))
        chosen = list(range(8)) if heads is None else heads
        others = [h for h in range(8) if h not in chosen]
        close(got[:, chosen], expected[:, chosen])
        assert torch.equal(got[:, others], plain[:, others]), which


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), ("bridge", "neox"), ("bridge", "olmo2-gqa")])
def test_freezing_all_is_distance_zero(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for heads in (None, [6, 1]):
        frozen = logits(model, limit_frequencies(model, high=0, mode="freeze", heads=heads))
        close(frozen, logits(model, dummy_distance(model, 0, heads=heads)), 2e-4)


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), ("bridge", "llama-yarn"), ("bridge", "neox")])
def test_the_whole_band_changes_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    fastest, slowest = (f(read_attention(model, 0).rotary.frequencies).item() for f in (torch.max, torch.min))
    for mode in ("drop", "freeze"):
        assert limit_frequencies(model, mode=mode) == []
        # Both ends belong to it, however a frequency was read off.
        ends = float(f"{slowest:.8g}"), float(f"{fastest:.8g}")
        assert torch.equal(logits(model, limit_frequencies(model, *ends, mode=mode, layers=[0])), plain)


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), ("bridge", "neox"), ("hooked", "qwen3")])
def test_what_a_band_and_its_complement_add_up_to(kind: str, name: str, shared_model: Any) -> None:
    """The scores, with what RoPE does not rotate counted twice; by the model's own numbers, where it shows scores."""
    model = shared_model(kind, name)
    spec = read_attention(model, 1)
    middle = cut(model, 1)

    def scores(*band: float | None) -> Tensor:
        hooks = limit_frequencies(model, *band, layers=[1])
        with torch.no_grad(), applied(model, hooks):
            return model.run_with_cache(TOKENS, names_filter=spec.scores)[1][spec.scores][..., spec.mask(L)]

    close(scores(middle, None) + scores(None, middle), scores(None, None) + scores(0, 0), 1e-5)
    if spec.rotary.dim == spec.d_head:
        assert scores(0, 0).abs().max() == 0
    else:
        assert scores(0, 0).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_exact_in_the_models_own_numbers(kind: str, name: str, shared_model: Any) -> None:
    """What stays in the band is not touched by rounding: queries of 0 and tables of position 0 are exact."""
    model = shared_model(kind, name)
    low = cut(model)
    spec = read_attention(model, 0)
    outside = spec.rotary.frequencies < low
    coordinates = torch.cat([outside, outside])
    name = spec.turn_q.name
    with torch.no_grad():
        plain = model.run_with_cache(TOKENS, names_filter=name)[1][name]
        unrotated = model.run_with_cache(TOKENS, names_filter=spec.q.name)[1][spec.q.name]
        for mode in ("drop", "freeze"):
            with model.hooks(fwd_hooks=limit_frequencies(model, low, mode=mode, layers=[0])):
                got = model.run_with_cache(TOKENS, names_filter=name)[1][name]
            assert torch.equal(got[..., ~coordinates], plain[..., ~coordinates])
            wanted = torch.zeros_like(got) if mode == "drop" else unrotated
            assert torch.allclose(got[..., coordinates], wanted[..., coordinates], atol=1e-5)
            assert mode == "freeze" or torch.equal(got[..., coordinates], wanted[..., coordinates])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_padding_on_the_left_is_right_or_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    mask, low = torch.ones(2, L, dtype=torch.int64), cut(model)
    mask[0, :4] = 0
    for mode in ("drop", "freeze"):
        hooks = limit_frequencies(model, low, mode=mode)
        try:
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                got = model(TOKENS, attention_mask=mask)
        except ValueError as error:
            assert (kind, mode) == ("hooked", "freeze"), error  # noqa: PT017 - or right
            continue
        close(got[0, 4:], logits(model, hooks, TOKENS[:1, 4:])[0])
        close(got[1], logits(model, hooks)[1])


@pytest.mark.parametrize(("kind", "name"), [("bridge", "smollm3"), ("bridge", "gemma3")])
def test_layers_of_other_kinds(kind: str, name: str, shared_model: Any) -> None:
    """Layers that do not rotate are passed over; a band may hold all of one layer and nothing of another."""
    model = shared_model(kind, name)
    hooks = limit_frequencies(model, high=cut(model), mode="freeze")
    layers = {x.spec.layer for x in hooks.interventions}
    assert layers == ({0} if name == "smollm3" else {0, 1})  # Gemma's third layer is slower
    assert (logits(model, hooks) - logits(model, [])).abs().max() > 0.05


def test_bfloat16() -> None:
    model = zoo.bridge("llama-gqa").to(torch.bfloat16)
    low = cut(model)
    for mode in ("drop", "freeze"):
        for heads in (None, [2, 3], [1, 6]):
            got = logits(model, limit_frequencies(model, low, mode=mode, layers=[0], heads=heads))
            assert got.dtype == torch.bfloat16
            assert bool(got.isfinite().all())
    fresh = zoo.bridge("llama-gqa")
    expected = logits(fresh, limit_frequencies(fresh, low, mode="drop"))
    got = logits(model, limit_frequencies(model, low, mode="drop")).float()
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_gradients_flow(shared_model: Any) -> None:
    model = shared_model("bridge", "neox")
    for mode in ("drop", "freeze"):
        with applied(model, limit_frequencies(model, high=cut(model), mode=mode, heads=[1])):
            loss = model(TOKENS).double().square().mean()
        (gradient,) = torch.autograd.grad(loss, next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB))
        assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": -1.0}, "low must be a frequency in radians per position, 0 or more, or None, got -1.0"),
        ({"high": float("nan")}, "high must be a frequency .* got nan"),
        ({"low": float("inf")}, "low must be a frequency .* got inf"),
        ({"low": True}, "low must be a frequency .* got True"),
        ({"high": "1"}, "high must be a frequency .* got '1'"),
        ({"low": 0.5, "high": 0.1}, "low must be at most high, got 0.5 and 0.1"),
        ({"low": 100}, "low and high must leave a frequency, .* got 100 and inf, and there are .*, 1$"),
        ({"low": 0.5, "high": 0.6}, "low and high must leave a frequency, .* got 0.5 and 0.6"),
        ({"mode": "zero"}, "mode must be 'drop' or 'freeze', got 'zero'"),
        ({"mode": None}, "mode must be 'drop' or 'freeze', got None"),
    ],
)
def test_what_is_no_band(arguments: dict[str, Any], message: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = state(model)
    with pytest.raises(ValueError, match=message):
        limit_frequencies(model, **arguments)
    assert state(model) == before


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("gpt2"), ("bridge", "bloom"), ("bridge", "deepseek_v3")])
def test_models_without_rotary(kind: str, name: str, shared_model: Any) -> None:
    with pytest.raises(ValueError, match="limit_frequencies needs rotary position embeddings"):
        limit_frequencies(shared_model(kind, name), 0.1)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_after_an_error_the_model_is_as_before(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, before = logits(model, []), state(model)

    def interrupt(x: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    for mode in ("drop", "freeze"):
        hooks = limit_frequencies(model, 0.5, mode=mode, heads=[1])
        with pytest.raises(KeyboardInterrupt):
            logits(model, [*hooks, ("blocks.1.attn.hook_pattern", interrupt)])
    assert state(model) == before
    assert torch.equal(logits(model, []), plain)
