"""The Λ-shaped window and position interpolation: brute force, what they leave alone, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import FEW, REAL, TOKENS, L, close, every_way, logits, mixed_of
from support.untouched import state
from torch import Tensor

from tl_posdisent import capture, lambda_mask, position_interpolation, read_attention, remap_distance, swap_positions
from tl_posdisent.hooks import applied
from tl_posdisent.hooks import length_extension as windows

DISTANCE = REAL[:, None] - REAL
# sinks, window, ceiling: one below the other and the other way round, a ceiling that hides nothing, no sinks.
SHAPES = [(2, 4, 4), (2, 4, 3), (1, 4, 7), (2, 6, 2), (3, 2, 1), (0, 3, 3), (2, 12, 3), (2, 3, 12), (12, 1, 5)]


def by_brute_force(model: Any, sinks: int, window: int, ceiling: int, layer: int) -> Tensor:
    """What every head takes along ``[batch, head, pos, d_head]``, in float64, cell by cell, from q, k and v."""
    captured = next(x for x in capture(model, TOKENS, layers=[layer]))
    spec, rotary = captured.spec, captured.spec.rotary
    name = f"blocks.{layer}.attn.hook_v"
    with torch.no_grad():
        values = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
    q, k, repeats = captured.q.double(), captured.k.double(), spec.n_heads // captured.k.shape[2]
    n = len(rotary.frequencies)
    first, second = (
        (slice(0, n), slice(n, 2 * n)) if rotary.pairing == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    )
    k, values = (x.repeat_interleave(repeats, 2) for x in (k, values))
    a, b = (torch.complex(x[..., first], x[..., second]) for x in (q, k))
    out = torch.zeros(len(q), spec.n_heads, L, q.shape[-1], dtype=torch.float64)
    beside = getattr(getattr(model.blocks[layer].attn, "original_component", model.blocks[layer].attn), "sinks", None)
    for i in range(L):
        sees = [j for j in range(i + 1) if (j < sinks or i - j < window) and i - j < (spec.window or L)]
        scores = []
        for j in sees:
            turn = torch.exp(1j * min(i - j, ceiling) * rotary.frequencies)
            turned = (a[:, i] * b[:, j].conj() * turn).real.sum(-1) * rotary.attention_factor**2
            scores.append(spec.scale * (turned + (q[:, i] * k[:, j])[..., 2 * n :].sum(-1)))
        row = torch.stack(scores, -1)
        row = row if spec.soft_cap is None else spec.soft_cap * (row / spec.soft_cap).tanh()
        if beside is not None:
            row = torch.cat([row, beside.detach().double()[:, None].expand(len(q), -1, 1)], -1)
        weights = row.softmax(-1)[..., : len(sees)]
        out[:, :, i] = torch.einsum("bhk,bkhd->bhd", weights, values[:, sees])
    return out.float()


@every_way
def test_lambda_mask_is_brute_force(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for n, shape in enumerate(SHAPES[:: 1 if name == "llama-gqa" else 3]):
        layer = n % 2
        close(mixed_of(model, lambda_mask(model, *shape, layers=[layer]), layer), by_brute_force(model, *shape, layer))


@every_way
def test_a_window_and_a_ceiling_as_long_as_the_text_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    close(logits(model, lambda_mask(model, 1, L, L)), plain)
    close(logits(model, lambda_mask(model, L, 1, L - 1)), plain)  # all keys are sinks
    for hooks in (lambda_mask(model, 1, L, 2), lambda_mask(model, 1, 3, L)):
        assert (logits(model, hooks) - plain).abs().max() > 0.01


@every_way
def test_the_ceiling_alone_is_a_remapped_distance(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    close(logits(model, lambda_mask(model, 0, L, 3)), logits(model, remap_distance(model, lambda d: d.clamp(max=3))))


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_lambda_mask_on_some_heads_leaves_the_others(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, every = mixed_of(model, []), mixed_of(model, lambda_mask(model, 1, 3, 2))
    some = mixed_of(model, lambda_mask(model, 1, 3, 2, heads=[5, 2]))
    chosen = [2, 5]
    others = [h for h in range(8) if h not in chosen]
    assert torch.equal(some[:, others], plain[:, others])
    close(some[:, chosen], every[:, chosen], 1e-6)
    assert (some[:, chosen] - plain[:, chosen]).abs().max() > 0.01


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_sixteen_bits(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    exact = logits(model, lambda_mask(model, 2, 4, 3))
    model.to(torch.bfloat16)
    rough = logits(model, lambda_mask(model, 2, 4, 3))
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).square().mean().sqrt() < 0.1 * exact.square().mean().sqrt()


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_gradients_flow_through_the_window(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    parameter = next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB)  # the embedding
    with applied(model, lambda_mask(model, 1, 4, 3)):
        (gradient,) = torch.autograd.grad(model(TOKENS).double().pow(2).mean(), parameter)
        step = 1e-3 * gradient / gradient.norm()
        with torch.no_grad():
            up, down = (_moved(model, parameter, s * step).double().pow(2).mean() for s in (1, -1))
    torch.testing.assert_close((up - down) / (2 * step.norm()), gradient.norm(), rtol=2e-2, atol=0, check_dtype=False)


def _moved(model: Any, parameter: Tensor, by: Tensor) -> Tensor:
    parameter.add_(by)
    result = model(TOKENS)
    parameter.sub_(by)
    return result


# --- interpolation ----------------------------------------------------------------------------------------------


@every_way
def test_interpolation_is_swapped_positions(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for factor in (2, 8.0, 0.4):
        got = logits(model, position_interpolation(model, factor))
        assert torch.equal(got, logits(model, swap_positions(model, REAL / factor)))
        close(got, logits(model, remap_distance(model, DISTANCE.double() / factor)), 2e-4)
    shorter = logits(model, position_interpolation(model, 2), TOKENS[:, :7])  # of any length
    assert torch.equal(shorter, logits(model, swap_positions(model, REAL[:7] / 2), TOKENS[:, :7]))


@every_way
def test_factor_one_changes_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    assert torch.equal(logits(model, position_interpolation(model, 1)), logits(model, []))


def test_layers_and_heads_of_interpolation(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    some = logits(model, position_interpolation(model, 3, layers=[1], heads=[1, 6]))
    assert torch.equal(some, logits(model, swap_positions(model, REAL.double() / 3, layers=[1], heads=[1, 6])))


# --- refusals ---------------------------------------------------------------------------------------------------

WRONG = [
    ((-1, 4, 4), "sinks must be an integer of at least 0, got -1"),
    ((1.0, 4, 4), r"sinks must be an integer of at least 0, got 1\.0"),
    ((True, 4, 4), "sinks must be an integer of at least 0, got True"),
    ((1, 0, 4), "window must be an integer of at least 1, got 0"),
    ((1, "4", 4), "window must be an integer of at least 1, got '4'"),
    ((1, 4, 0), "distance_ceiling must be an integer of at least 1, got 0"),
    ((1, 4, None), "distance_ceiling must be an integer of at least 1, got None"),
    ((1, 4, float("inf")), "distance_ceiling must be an integer of at least 1, got inf"),
]


@pytest.mark.usefixtures("unchecked")
def test_wrong_numbers(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = state(model)
    for shape, message in WRONG:
        with pytest.raises(ValueError, match=message):
            lambda_mask(model, *shape)
    for factor in (0, -1.5, float("nan"), float("inf"), True, "2", None, torch.tensor(2)):
        with pytest.raises(ValueError, match="factor must be a finite number above 0, got"):
            position_interpolation(model, factor)
    assert state(model) == before


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2", "bloom"))
def test_models_without_rotary_are_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for tool, use in (
        ("lambda_mask", lambda: lambda_mask(model, 1, 4, 4)),
        ("position_interpolation", lambda: position_interpolation(model, 2)),
    ):
        with pytest.raises(ValueError, match=f"{tool} needs rotary position embeddings .* but layer 0 of"):
            use()


@pytest.mark.usefixtures("unchecked")
def test_bidirectional_models_are_refused(shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    model = shared_model("bridge", "llama-gqa")
    spec = replace(read_attention(model, 0), causal=False)
    monkeypatch.setattr(windows, "rotary_heads", lambda *_: [(spec, [0])])
    with pytest.raises(ValueError, match="lambda_mask needs causal attention, but layer 0 of LlamaForCausalLM is not"):
        lambda_mask(model, 1, 4, 4)


@every_way
def test_a_padded_text_is_masked_as_the_text_alone(kind: str, name: str, shared_model: Any) -> None:
    """Sinks and distances count from the text's own first token."""
    model = shared_model(kind, name)
    mask = torch.ones(2, L, dtype=torch.int64)
    mask[0, :4] = 0
    hooks = lambda_mask(model, 1, 4, 3)
    if (kind, name) == ("bridge", "gptj"):
        with pytest.raises(ValueError, match="run the model on whole, unpadded texts"), torch.no_grad():
            model.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=hooks)
        return
    with torch.no_grad(), applied(model, hooks):
        got = model(TOKENS, attention_mask=mask)
    close(got[0, 4:], logits(model, hooks, TOKENS[:1, 4:])[0])
    close(got[1], logits(model, hooks)[1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_after_an_exception_the_model_is_as_before(kind: str, name: str, error: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, before = logits(model, []), state(model)

    def stop(x: Tensor, hook: Any) -> None:
        raise error("stop")

    for hooks in (lambda_mask(model, 1, 4, 3), position_interpolation(model, 2)):
        with pytest.raises(error, match="stop"):
            logits(model, [*hooks, ("blocks.1.attn.hook_z", stop)])
        assert state(model) == before
        assert torch.equal(logits(model, []), plain)
