"""What is read of a model does not depend on how sharp its attention is, nor on the dtype of its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import capture, dummy_distance, read_model
from tl_posdisent.models import AttentionSpec

TOKENS = zoo.random_tokens()


def with_scores_of(model: Any, deviation: float) -> None:
    """Scale W_Q, in its place a permanent hook, so that each layer's scores have this standard deviation."""
    gains: dict[int, float] = {}

    def scaled(x: Any, hook: Any, layer: int) -> Any:
        return x * gains.get(layer, 1.0)

    specs = read_model(model).specs()
    for spec in specs:
        name = spec.taps.q.name
        model.hook_dict[name].add_hook(lambda x, hook, layer=spec.layer: scaled(x, hook, layer), is_permanent=True)
    for spec in specs:  # one layer after the other: each changes what the next one gets
        (layer,) = capture(model, TOKENS, layers=[spec.layer])
        gains[spec.layer] = deviation / float(layer.scores[..., spec.mask(12)].double().std())


def described(spec: AttentionSpec) -> tuple[Any, ...]:
    rotation = None if spec.rotary is None else (spec.rotary.pairing, spec.rotary.dim)
    scale = None if spec.scale is None else (round(spec.scale, 6), spec.soft_cap)
    edits = (spec.taps.q_rot and spec.taps.q_rot.name, spec.limits.scores_editable)
    return (spec.causal, spec.window, spec.limits.problem, spec.limits.no_rotation, rotation, scale, *edits)


EVERY = [(d, x) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16) for x in (0.01, 1, 100, 10_000)]
SOME = [(torch.float32, 10_000), (torch.bfloat16, 0.01), (torch.float16, 100)]
GENTLE = [(torch.bfloat16, 0.01), (torch.float16, 1)]
OF = {"llama-gqa": EVERY} | dict.fromkeys(("gptj", "gpt2"), SOME) | dict.fromkeys(("olmo2", "gemma2"), GENTLE)
CASES = [
    pytest.param(*case.values, *one, id=f"{case.id}-{one}", marks=case.marks if one in SOME else pytest.mark.slow)
    for case in zoo.cases(*OF)
    for one in OF[case.values[1]]
]


@pytest.mark.parametrize(("kind", "name", "dtype", "deviation"), CASES)
def test_the_reading_is_that_of_gentle_attention(kind: str, name: str, dtype: torch.dtype, deviation: float) -> None:
    model = zoo.load(kind, name)
    exact = read_model(model).specs()
    expected = [described(spec) for spec in exact]
    with_scores_of(model, deviation)
    model.to(dtype)
    model.cfg.dtype = dtype
    too_large = dtype == torch.float16 and deviation > 1000  # the model's own products may be beyond its numbers
    try:
        specs = read_model(model).specs()
    except ValueError as error:
        if too_large and "NaN or infinite" in str(error):
            return
        raise
    assert [described(spec) for spec in specs] == expected
    if too_large:
        return
    for wide, spec in zip(exact, specs, strict=True):
        if wide.rotary is not None:
            torch.testing.assert_close(spec.rotary.frequencies, wide.rotary.frequencies, rtol=4e-3, atol=1e-4)
    for layer in capture(model, TOKENS):
        assert layer.scores[..., layer.spec.mask(12)].isfinite().all()
    if specs[0].rotary is not None:
        assert dummy_distance(model, 3)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "olmo2"))
def test_float16_models_whose_scores_are_wider_are_read_unpadded(name: str) -> None:
    model = zoo.bridge(name).to(torch.float16)
    plain = [described(spec) for spec in read_model(zoo.bridge(name)).specs()]
    assert [described(spec) for spec in read_model(model).specs()] == plain
    assert len(capture(model, TOKENS)) == 2
