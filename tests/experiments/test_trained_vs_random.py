"""Every measure beside its chance level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo

import tl_posdisent as tp
from tl_posdisent import (
    additivity,
    capture,
    controlled_distance,
    positional_symbolic,
    random_control,
    subspace_patterns,
    trained_vs_random,
)
from tl_posdisent.models import read_model
from tl_posdisent.rope import Moments, interaction_bound

Model = Callable[[str, str], Any]
TOKENS = zoo.random_tokens(length=12, batch=2)


def measures(model: Any, sinks: int) -> pd.DataFrame:
    """All measures of one model, one function after the other."""
    index, quiet = ["layer", "head"], {"progress": False}
    late = torch.arange(12) >= sinks
    r = additivity(model, TOKENS, mask=late[:, None] & late & torch.ones(12, 12).tril().bool(), **quiet)
    controlled = controlled_distance(model, TOKENS, sinks=sinks, **quiet).set_index(index)
    plane = positional_symbolic(model, TOKENS, sinks=sinks, **quiet).groupby(index).mean()
    patterns = subspace_patterns(model, TOKENS, sinks=sinks, **quiet).groupby(index).mean()
    bounds = []
    for layer in capture(model, TOKENS, scores=False):
        moments = Moments.from_qk(layer.q[:, sinks:], layer.k[:, sinks:], layer.spec.rotary)
        bounds.append(interaction_bound(moments, range(12), scale=layer.spec.scale)["separate"])
    table = controlled[["r_three_axis", "r_two_axis", "distance:key", "distance:query:key"]].assign(
        **{name: r.groupby(index)[name].mean() for name in ("r", "r_no_distance", "r_held_out")},
        bound=pd.concat(bounds).tolist(),
        concentration=patterns["key_concentration"],
    )
    return table.join(plane[["positional", "symbolic"]])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_each_measure_is_that_of_its_own_function(kind: str, name: str, shared_model: Model) -> None:
    model, seeds, sinks = shared_model(kind, name), (4, 5), 3
    table = trained_vs_random(model, TOKENS, seeds=seeds, sinks=sinks, progress=False)
    columns = ["layer", "head", "measure", "std", "trained", "random", "random_std"]
    assert table.columns.tolist() == columns
    assert (table.groupby(["layer", "head"]).size() == 11).all()
    wide = table.pivot_table(index=["layer", "head"], columns="measure")
    trained = measures(model, sinks)
    copies = [measures(m, sinks) for m in random_control(model, seeds)]
    chance = torch.stack([torch.tensor(x.to_numpy()) for x in copies])
    for at, measure in enumerate(trained.columns):
        expected = {"trained": torch.tensor(trained[measure].tolist()).double()}
        expected |= {"random": chance[..., at].mean(0), "random_std": chance[..., at].std(0)}
        for column, value in expected.items():
            found = torch.tensor(wide[column][measure].tolist()).double()
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7, msg=f"{measure}, {column}")


@pytest.mark.parametrize("sinks", [0, 1])
def test_the_longest_of_texts_of_unequal_length_is_held_out_too(sinks: int, shared_model: Model) -> None:
    """Without sinks, the number is that of ``additivity``."""
    model, real = shared_model("bridge", "llama-gqa"), torch.arange(12) < torch.tensor([[12], [9]])
    texts: dict[str, Any] = {"tokens": TOKENS, "attention_mask": real.long(), "layers": [1], "progress": False}
    table = trained_vs_random(model, **texts, seeds=1, sinks=sinks).set_index("measure").loc["r_held_out"]
    assert table["trained"].notna().all()
    if not sinks:
        both = additivity(model, **texts).pivot(index="head", columns="batch", values="r_held_out")
        assert table.set_index("head")["trained"].tolist() == pytest.approx(both.mean(axis=1).tolist(), abs=1e-6)


def test_a_layer_is_the_mean_of_its_heads(shared_model: Model) -> None:
    model, options = shared_model("bridge", "llama-gqa"), {"seeds": [1, 2], "progress": False, "layers": [1]}
    heads = trained_vs_random(model, TOKENS, **options)
    layers = trained_vs_random(model, TOKENS, by="layer", **options).set_index("measure")
    assert layers["layer"].unique().tolist() == [1]
    for column in ("trained", "random"):
        means = heads.groupby("measure")[column].mean()
        pd.testing.assert_series_equal(layers[column].sort_index(), means.sort_index())
    spread = heads.groupby("measure")["random_std"].mean()
    assert (layers["random_std"].sort_index() < spread).all()  # what heads have by accident cancels


def test_one_copy_has_no_deviation(shared_model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    model = shared_model("bridge", "llama-gqa")
    table = trained_vs_random(model, TOKENS, seeds=[0], layers=[0], progress=False)
    assert capfd.readouterr().err == ""
    assert table["random_std"].isna().all()
    assert not table["random"].isna().any()


def test_layers_that_do_not_rotate_are_passed_over(shared_model: Any) -> None:
    """By default all that rotate; a layer that does not is refused when it is asked for."""
    model, tokens = shared_model("bridge", "smollm3"), zoo.random_tokens()
    table = trained_vs_random(model, tokens, seeds=[0], progress=False)
    rotating = [spec.layer for spec in read_model(model).specs() if spec.rotary is not None]
    assert sorted(table["layer"].unique()) == rotating != list(range(model.cfg.n_layers))
    with pytest.raises(ValueError, match=r"trained_vs_random needs rotary .* layer 1 of SmolLM3ForCausalLM"):
        trained_vs_random(model, tokens, layers=[1], seeds=[0], progress=False)


def test_one_copy_has_no_standard_deviation_and_says_so() -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=32)
    one, two = (trained_vs_random(model, tokens, layers=[0], seeds=n, progress=False) for n in (1, 2))
    assert one["random_std"].isna().all()
    assert "one copy has no standard deviation" in one.attrs["random_std"]
    assert two["random_std"].notna().all()
    assert "random_std" not in two.attrs
