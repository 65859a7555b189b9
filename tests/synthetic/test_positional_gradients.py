"""Gradients of the positional part against finite differences, and margins by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support.small_models import small_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.synthetic import SyntheticModel, gradient_margins, positional_gradients
from tl_posdisent.synthetic.analysis.positional_gradients import _vectors

TOKENS = torch.randint(1, 20, (12, 9), generator=torch.Generator().manual_seed(3))
TOKENS[::3, 6:] = 0
LABELS = torch.arange(12) % 5
NAMES = ["mean_norm", "norm_of_mean", "expected_norm"]


def model_of(**changed: Any) -> SyntheticModel:
    return small_model(**({"pad_id": 0} | changed)).double()


def slope(model: SyntheticModel, layer: int, head: int, change: Tensor) -> float:
    """How the loss grows as this is added to a head's scores, from two losses."""
    losses = []
    for step in (1e-4, -1e-4):

        def add(x: Tensor, hook: Any, step: float = step) -> Tensor:
            x = x.clone()
            x[:, head] += step * change
            return x

        with torch.no_grad():
            logits = model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.{layer}.attn.hook_attn_scores", add)])
        losses.append(cross_entropy(logits, LABELS).item())
    return (losses[0] - losses[1]) / 2e-4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("encoding", ["rope", "learned", "alibi"])
def test_gradient_of_a_distance_profile_by_differences(encoding: str, causal: bool) -> None:
    model = model_of(encoding=encoding, causal=causal)
    got = _vectors(model, TOKENS, LABELS, "distance")
    distance = torch.arange(9)[:, None] - torch.arange(9)
    assert got.shape == (2, 3, 17)
    for layer, head, d in ((0, 0, 0), (0, 2, 3), (1, 1, 1), (1, 0, -2), (0, 1, 8)):
        expected = slope(model, layer, head, (distance == d).double())
        assert got[layer, head, d + 8].item() == pytest.approx(expected, abs=2e-7)
        assert (expected == 0) == (causal and d < 0)
    assert float(got.sum(-1).abs().max()) < 1e-6 * float(got.abs().max())  # no softmax sees a constant


@pytest.mark.parametrize("encoding", ["rope", "mla", "absolute_rope"])
def test_gradient_of_a_rotation_by_differences(encoding: str) -> None:
    model = model_of(encoding=encoding)
    got = _vectors(model, TOKENS, LABELS, "encoding")
    with torch.no_grad():
        cache = model.run_with_cache(TOKENS)[1]
    n = model.config.rotary_dim // 2
    place, every = torch.arange(9.0).double(), torch.arange(-8.0, 9.0).double()
    assert got.shape == (2, 3, n)
    for layer, head, c in ((0, 0, 0), (1, 2, n - 1), (1, 0, 0)):
        q, k = (torch.complex(x[:, :, head, c], x[:, :, head, c + n]) for x in (cache["q", layer], cache["k", layer]))
        theta = 10000.0 ** (-c / n)
        products = q[:, :, None] * k[:, None].conj()
        turning = torch.exp(1j * theta * (place[:, None] - place)) - torch.exp(1j * theta * every).mean()
        positional = (products * turning).real / model.config.head_size**0.5
        assert got[layer, head, c].item() == pytest.approx(slope(model, layer, head, positional), abs=2e-7)


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
def test_gradient_of_a_bias_by_differences(encoding: str) -> None:
    model = model_of(encoding=encoding)
    got = _vectors(model, TOKENS, LABELS, "encoding")
    bias = model.encoding.bias(9).detach()
    for layer, head in ((0, 0), (1, 2)):
        expected = slope(model, layer, head, bias[head])
        assert got[layer, head, 0].item() == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize(("encoding", "part"), [("rope", "distance"), ("mla", "encoding"), ("alibi", "encoding")])
def test_bfloat16(encoding: str, part: Any) -> None:
    exact = model_of(encoding=encoding)
    rounded = small_model(pad_id=0, encoding=encoding).to(torch.bfloat16)
    expected, got = (_vectors(model, TOKENS, LABELS, part) for model in (exact, rounded))
    assert float((got - expected).norm() / expected.norm()) < 0.05


def test_heads_that_do_not_rotate_have_no_rotation_to_learn() -> None:
    model = model_of(encoding="rope", rotary_heads=2)
    got = _vectors(model, TOKENS, LABELS, "encoding").norm(dim=-1)
    assert torch.equal(got > 0, torch.tensor([True, True, False]).expand(2, 3))
    table = positional_gradients(model, (TOKENS, LABELS), part="encoding", batches=2, batch_size=3, progress=False)
    assert (table["mean_norm"] == 0).tolist() == [False, False, True] * 2


def test_columns_by_hand() -> None:
    model = model_of(encoding="rope")
    table = positional_gradients(model, (TOKENS, LABELS), batches=3, batch_size=4, progress=False)
    assert table[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in (0, 1) for head in range(3)]
    g = [_vectors(model, TOKENS[n : n + 4], LABELS[n : n + 4], "distance").flatten(0, 1) for n in (0, 4, 8)]
    for row in range(6):
        one = [x[row] for x in g]
        mean = sum(one) / 3
        norms = sum(x.norm() for x in one) / 3
        # Products of different batches have no noise in common.
        pairs = sum(one[a] @ one[b] for a in range(3) for b in range(3) if a != b) / 6
        expected = [norms, mean.norm(), pairs.clamp_min(0).sqrt()]
        assert table.loc[row, NAMES].tolist() == pytest.approx([float(x) for x in expected], rel=1e-5, abs=1e-12)


def test_the_model_is_left_alone_and_dropout_is_off() -> None:
    model = model_of(encoding="rope", dropout=0.5).train()
    model.blocks[0].ln1.eval()
    flags = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    plain = positional_gradients(model.eval(), (TOKENS, LABELS), batches=2, batch_size=6, progress=False)
    model.train()
    model.blocks[0].ln1.eval()
    again = positional_gradients(model, (TOKENS, LABELS), batches=2, batch_size=6, progress=False)
    pd.testing.assert_frame_equal(plain, again)
    assert [part.training for part in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = positional_gradients(model, (TOKENS, LABELS), batches=2, batch_size=6, progress=False)
    pd.testing.assert_frame_equal(plain, frozen)


def test_margins_by_hand() -> None:
    rows = [(0, 0, 0, 1.0), (0, 0, 1, 4.0), (0, 0, 2, 3.5), (0, 1, 0, 2.0), (0, 1, 1, 1.0), (0, 1, 2, 0.0)]
    rows += [(5, layer, head, 2 * value + layer) for _, layer, head, value in rows]
    table = pd.DataFrame(rows, columns=["step", "layer", "head", "norm_of_mean"])
    margins = gradient_margins(table.sample(frac=1, random_state=0))
    expected = [(0, 0, 1, 4, 3.5, 0.5), (0, 1, 0, 2, 1, 1), (5, 0, 1, 8, 7, 1), (5, 1, 0, 5, 3, 2)]
    assert margins.to_numpy().tolist() == [list(map(float, row)) for row in expected]
    assert margins.columns.tolist() == ["step", "layer", "head", "largest", "second", "margin"]
    errors = gradient_margins(table.assign(norm_of_mean_se=0.6))["margin_se"]
    assert errors.tolist() == pytest.approx([0.6 * 2**0.5] * 4)


@pytest.mark.parametrize("batches", [3, 6])
def test_standard_errors_are_those_of_leaving_batches_out(batches: int) -> None:
    """Each time measured anew, without one of the batches."""
    model, size = model_of(encoding="rope"), 12 // batches
    table = positional_gradients(model, (TOKENS, LABELS), batches=batches, batch_size=size, progress=False)
    without = []
    for n in range(batches):
        rest = [i for i in range(12) if i // size != n]
        some = (TOKENS[rest], LABELS[rest])
        without.append(positional_gradients(model, some, batches=batches - 1, batch_size=size, progress=False))
    for name in ("mean_norm", "norm_of_mean", "expected_norm"):
        values = torch.stack([torch.tensor(one[name].to_numpy()) for one in without])
        error = ((batches - 1) / batches * (values - values.mean(0)).square().sum(0)).sqrt()
        assert table[f"{name}_se"].tolist() == pytest.approx(error.tolist(), rel=1e-5, abs=1e-12)
    same = (TOKENS[:4].repeat(3, 1), LABELS[:4].repeat(3))
    alike = positional_gradients(model, same, batches=3, batch_size=4, progress=False)
    assert alike["norm_of_mean_se"].max() < 1e-6 * alike["norm_of_mean"].max()


def test_a_model_with_nan_is_noticed_and_left_alone() -> None:
    model = model_of()
    with torch.no_grad():
        model.unembed.W_U[0, 0] = torch.nan
    with pytest.raises(ValueError, match="model must have a finite loss and gradient on the task, got a loss of nan"):
        positional_gradients(model.train(), (TOKENS, LABELS), batches=2, batch_size=4, progress=False)
    assert all(part.training for part in model.modules())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
