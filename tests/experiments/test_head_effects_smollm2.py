"""The search in SmolLM2-135M with halved distances, where the largest divergence of a head is nine times its curvature.

The expected numbers are those of TransformerLens's ``run_with_hooks``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support.packaged_models import packaged_model
from torch import Tensor

from tl_posdisent import head_effects, remap_distance
from tl_posdisent.demo.demo_model import demo_text

# Half a minute and more: before a release. Always, test_head_search.py has the search on numbers, and
# test_head_effects.py on small models.
pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.usefixtures("unchecked")]
LAYERS = [*range(14, 19)]


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


def together(model: Any, tokens: Tensor, table: pd.DataFrame) -> float:
    """The largest divergence of the heads of one layer that were not run, changed together."""
    rest = table[table["kl"].isna()].groupby("layer")["head"]
    return max(divergence(model, tokens, layers=[layer], heads=heads.tolist()) for layer, heads in rest)


def test_a_head_far_beyond_its_estimate_is_found(model: Any, tokens: Tensor) -> None:
    """Without draws, the search begins with the largest first orders, of which this head's is the 27th."""
    options: dict[str, Any] = {"layers": LAYERS, "exact": 1, "draws": 0, "progress": False}
    table = head_effects(model, tokens, {"halved": halved(model)}, **options)
    place = table.index[(table["layer"] == 16) & (table["head"] == 0)].item()
    assert table["first"].abs().rank(ascending=False)[place] > 20
    assert table["kl"].idxmax() == place
    expected = divergence(model, tokens, layers=[16], heads=[0])
    assert expected == pytest.approx(0.0507, abs=2e-3)
    assert table["kl"][place] == pytest.approx(expected, abs=1e-5)
    search = table.attrs["search"]["halved"]
    assert (search["heads"], search["run"]) == (45, table["kl"].notna().sum())
    assert search["run"] < 20
    assert search["bound"] == pytest.approx(together(model, tokens, table), abs=1e-5)
    assert search["bound"] < expected / 5


def test_the_largest_of_all_heads_are_found(model: Any, tokens: Tensor) -> None:
    table, whole = (
        head_effects(model, tokens, {"halved": halved(model)}, progress=False, **options)
        for options in ({}, {"exact": "all"})
    )
    kl, run = whole["kl"], table["kl"].notna()
    assert (kl > 5 * whole["curvature"])[kl.idxmax()]
    assert run[kl.nlargest(4).index].all()
    assert run[kl.nlargest(8).index].sum() >= 7
    assert run.sum() < 60
    assert table["kl"][run].tolist() == pytest.approx(kl[run].tolist(), abs=1e-5)
    search = table.attrs["search"]["halved"]
    assert kl[~run].max() <= search["bound"] < kl.nlargest(4).min()
    assert search["bound"] == pytest.approx(together(model, tokens, table), abs=1e-5)
    assert table.attrs["passes"] < whole.attrs["passes"] / 2
