"""Effects in SmolLM2-135M with halved distances, where the largest divergence of a head is nine times its curvature.

The expected numbers are those of TransformerLens's ``run_with_hooks``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.packaged_models import packaged_model
from torch import Tensor

from tl_posdisent import head_effects, remap_distance
from tl_posdisent.demo.demo_model import demo_text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]
LARGEST = [(16, 0), (1, 2), (11, 1), (19, 3)]
"""The heads of the largest divergences, by runs of all 270 heads."""


@pytest.fixture(scope="module")
def model() -> Any:
    return packaged_model("smollm2")


@pytest.fixture(scope="module")
def tokens(model: Any) -> Tensor:
    """Two texts of 96 tokens behind their BOS."""
    text = model.tokenizer(demo_text(), return_tensors="pt")["input_ids"][0, : 2 * 95].view(2, 95)
    return torch.cat([torch.ones(2, 1, dtype=torch.long), text], 1)


def halved(model: Any, **heads: Any) -> Any:
    return remap_distance(model, lambda d: d / 2, **heads)


def divergence(model: Any, tokens: Tensor, **heads: Any) -> float:
    with torch.no_grad():
        runs = model(tokens), model.run_with_hooks(tokens, fwd_hooks=halved(model, **heads))
    p, q = (logits[:, :-1].double().log_softmax(-1) for logits in runs)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_the_largest_are_run_and_the_others_bounded(model: Any, tokens: Tensor) -> None:
    table = head_effects(model, tokens, {"halved": halved(model)}, progress=False).set_index(["layer", "head"])
    run, runs = table["kl"].notna(), table.attrs["runs"]["halved"]
    assert (runs["heads"], runs["run"], runs["largest"]) == (270, 24, "L16H0")
    assert table["kl"].nlargest(4).index.tolist() == LARGEST
    largest = table.loc[(16, 0)]
    assert largest["kl"] == pytest.approx(0.0507, abs=2e-3)
    assert largest["kl"] > 5 * largest["curvature"]
    for layer, head in LARGEST[:2]:
        assert table["kl"][layer, head] == pytest.approx(
            divergence(model, tokens, layers=[layer], heads=[head]), abs=1e-5
        )
    others = table.index[~run].to_frame(index=False).groupby("layer")["head"]
    together = max(divergence(model, tokens, layers=[layer], heads=heads.tolist()) for layer, heads in others)
    assert runs["bound"] == pytest.approx(together, abs=1e-5)
    assert runs["bound"] < table["kl"].nlargest(4).min()
    assert table.attrs["passes"] < 85
