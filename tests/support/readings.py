"""What a reading must do: give a layer's own scores, pattern and result from its queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent import read_model
from tl_posdisent.models import AttentionSpec
from tl_posdisent.models.reading.query_key_hooks import Tap


def assert_described(model: Any, tokens: Int[Tensor, "batch pos"], atol: float = 1e-4) -> list[AttentionSpec]:
    """Compare what each layer shows in a pass with what its description gives, and return the descriptions."""
    specs, fired = list(read_model(model).attention), list[str]()
    points = {name for spec in specs for name in spec.points}
    with torch.no_grad():
        cache = model.run_with_cache(tokens)[1]
        notes = [(name, lambda x, hook, name=name: fired.append(name)) for name in points]
        model.run_with_hooks(tokens, fwd_hooks=notes)
        for spec in specs:
            assert spec.limits.problem is None
            assert [*spec.points] == [name for name in fired if name in spec.points]
            _assert_layer(spec, cache, atol)
    return specs


def _assert_layer(spec: AttentionSpec, cache: Any, atol: float) -> None:
    def read(tap: Tap | None) -> Tensor:
        assert tap is not None
        return tap.read(*(cache[name] for name in tap.names))

    def close(shown: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(shown, expected, rtol=0, atol=atol)

    taps = spec.taps
    q, k = read(taps.q), read(taps.k)
    assert (q.shape[2:], k.shape[2:]) == ((spec.n_heads, spec.d_head), (spec.n_kv_heads, spec.d_head))
    positions = torch.arange(q.shape[1])
    q_rot, k_rot = (spec.rotated(x, positions) for x in (q, k))
    if taps.q_rot is not None:
        close(read(taps.q_rot), q_rot)
        close(read(taps.k_rot), k_rot)
    scores, mask = spec.score(q_rot, k_rot), spec.mask(q.shape[1])
    if taps.scores is not None:
        shown = cache[taps.scores]
        close(shown[..., mask], scores[..., mask])
        assert bool((spec.is_masked(shown) == ~mask).all())
    pattern = cache[taps.pattern]
    close(pattern / pattern.sum(-1, keepdim=True), scores.masked_fill(~mask, -torch.inf).softmax(-1))  # beside sinks
    if taps.scores is None:
        gate = None if taps.gate is None else read(taps.gate)
        close(cache[taps.z], spec.gathered(pattern, read(taps.v), gate))
