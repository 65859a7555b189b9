"""Effects of interventions on single heads: estimates against derivatives by brute force, exact ones against loops."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.small_models import small_model
from support.tolerance import rounding
from torch import Tensor, nn

from tl_posdisent import (
    ablate_heads,
    dummy_distance,
    head_effects,
    knock_out,
    logit_difference,
    remap_distance,
    swap_positions,
)
from tl_posdisent.experiments.measuring.curvature import curvature, drawn_labels
from tl_posdisent.experiments.measuring.token_losses import logits_of
from tl_posdisent.hooks import drop_component, substitute_attention
from tl_posdisent.hooks.ablate import replace_heads
from tl_posdisent.hooks.hook_list import Hooks, any_heads, joined
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.utils.errors import ArgumentError

TOKENS = zoo.random_tokens(length=9, batch=3)
CLOSE = rounding(log(61), 2)  # of the difference of two losses of logits in float32
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))


def effects(model: Any, interventions: Any, *more: Any, tokens: Any = TOKENS, **options: Any) -> pd.DataFrame:
    return head_effects(model, tokens, interventions, *more, **{"progress": False, "draws": 1} | options)


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """One number for each text."""
    flat = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1).mean(1)


def divergences(p: Tensor, q: Tensor) -> Tensor:
    p, q = (x[:, :-1].double().log_softmax(-1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1).mean(1)


def edited(model: Any, edit: Callable[[Tensor], Tensor], heads: Any = None, layers: Any = None) -> Hooks:
    """Edit the results of heads by a function."""
    chosen = any_heads(model, layers, heads)
    return joined([replace_heads(spec, some, lambda layer, heads, z: edit(z)) for spec, some in chosen])


def scaled(model: Any, by: float) -> Hooks:
    return edited(model, lambda z: by * z)


def in_float64(kind: str, name: str) -> Any:
    return zoo.load(kind, name).double()


# --- exact effects --------------------------------------------------------------------------------------------


def some_interventions(model: Any, heads: Any = None, layers: Any = None) -> dict[str, Any]:
    found: dict[str, Callable[[], Any]] = {
        "zero": lambda: ablate_heads(model, heads, layers=layers),
        "uniform": lambda: substitute_attention(model, "uniform", layers=layers, heads=heads),
        "additive": lambda: drop_component(model, "residual", layers=layers, heads=heads),
        "distance": lambda: dummy_distance(model, 2, layers=layers, heads=heads),
    }
    rotary = model.cfg.positional_embedding_type == "rotary" if hasattr(model, "cfg") else True
    return {name: make() for name, make in found.items() if name != "distance" or rotary}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "bloom", "gemma2", "gpt_oss"))
def test_exact_effects_are_those_of_a_loop(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = some_interventions(model, heads=[1, 6])
    table = effects(model, hooks, exact="all").set_index(["intervention", "layer", "head"])
    with torch.no_grad():
        clean = model(TOKENS)
    sizes = []
    for (intervention, layer, head), row in table.iterrows():  # type: ignore[misc]
        hooks = some_interventions(model, heads=[int(head)], layers=[int(layer)])[intervention]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            changed = model(TOKENS)
        effect, kl = losses(changed, TOKENS) - losses(clean, TOKENS), divergences(clean, changed)
        assert row["exact"] == pytest.approx(effect.mean().item(), abs=CLOSE)
        assert row["exact_se"] == pytest.approx(effect.std().item() / 3**0.5, abs=CLOSE)
        assert row["kl"] == pytest.approx(kl.mean().item(), abs=2e-6)
        sizes.append(abs(row["exact"]))
    assert len(sizes) == 4 * table.index.get_level_values(0).nunique()
    assert np.median(sizes) > 1e-3


# --- first order ----------------------------------------------------------------------------------------------


@FEW
@pytest.mark.parametrize("metric", ["loss", "logit difference", "own"])
def test_the_first_order_is_that_of_finite_differences(kind: str, name: str, metric: str) -> None:
    model, step = in_float64(kind, name), 4e-3  # whose square is the error of differences
    chosen: Any = {
        "loss": (),
        "logit difference": (logit_difference([3, 5, 8], wrong=[9, 4, 2], position=[-1, 4, -3]),),
        "own": (lambda logits, tokens: logits[:, -1].tanh().mean(),),  # one number for all texts
    }[metric]
    up, down = (effects(model, {"up": scaled(model, x)}, *chosen, exact="all") for x in (1 + step, 1 - step))
    slopes = (up["exact"] - down["exact"]) / 2
    assert up["first"].tolist() == pytest.approx(slopes.tolist(), rel=2e-3, abs=1e-3 * slopes.abs().median())
    assert slopes.abs().median() > 1e-3 * step
    assert up["first"].tolist() == pytest.approx((-down["first"]).tolist(), rel=1e-9)


# --- curvature ------------------------------------------------------------------------------------------------


def fisher_form(model: Any, tokens: Tensor, layer: int, head: int, delta: Callable[[Tensor], Tensor]) -> float:
    """δᵀFδ of one head, all labels enumerated: log-probabilities differentiated along δ by differences."""
    moved = []
    for step in (3e-3, -3e-3):

        def move(z: Tensor, hook: Any, step: float = step) -> Tensor:
            z = z.clone()
            z[:, :, head] += step * delta(z[:, :, head])
            return z

        with torch.no_grad(), model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", move)]):
            moved.append(model(tokens)[:, :-1].log_softmax(-1))
    with torch.no_grad():
        p = model(tokens)[:, :-1].softmax(-1)
    return float((p * ((moved[0] - moved[1]) / 6e-3).square()).sum())


@pytest.mark.parametrize("ignore", [None, [int(x) for x in TOKENS[:, 5]]])
@pytest.mark.parametrize("draws", [2, 3])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_curvature_is_the_mean_square_of_drawn_surprises(kind: str, name: str, draws: int, ignore: Any) -> None:
    """Differentiated by torch, text by text, with labels drawn by hand; texts of unequal length."""
    model, seed = in_float64(kind, name), 5
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 9])
    reading = read_model(model)
    hooks, texts = {"zero": ablate_heads(reading, None)}, read_texts(model, TOKENS * mask, mask, ignore)
    pairs = hooks["zero"].pairs
    for by_position in (False, True):
        found = curvature(reading, texts, hooks, {"zero": pairs}, draws, seed=seed, by_position=by_position)
        for row, text in enumerate(texts.unpadded()):
            z: dict[int, Tensor] = {}

            def keep(x: Tensor, hook: Any, z: dict[int, Tensor] = z) -> Tensor:
                z[hook.layer()] = x + torch.zeros_like(x, requires_grad=True)
                return z[hook.layer()]

            log_p = model.run_with_hooks(text[None], fwd_hooks=[(lambda x: x.endswith("hook_z"), keep)])
            log_p = log_p[0, :-1].log_softmax(-1)
            uniform = np.random.default_rng((seed, row)).random((draws, len(text)))[:, :-1]
            counted, squares = ~torch.isin(text[:-1], torch.tensor(ignore or [])), 0
            for u in torch.as_tensor(uniform):
                labels = (log_p.exp().cumsum(-1) <= u[:, None]).sum(-1)
                surprise = -log_p.gather(-1, labels[:, None])[counted].sum()
                slopes = torch.autograd.grad(surprise, [z[0], z[1]], retain_graph=True)
                products = torch.stack([(s * -z[n]).sum(-1)[0] for n, s in enumerate(slopes)])
                of_parts = products if by_position else products.sum(1, keepdim=True)
                squares = squares + of_parts.square().sum(1).flatten()
            assert found.predictions[row] == counted.sum()
            expected = squares / draws / 2 / counted.sum()
            torch.testing.assert_close(found.curvature["zero"][:, row], expected.detach(), rtol=1e-5, atol=1e-9)


@FEW
def test_curvature_is_half_the_squared_gradient_of_the_drawn_surprise(kind: str, name: str) -> None:
    """Averaged over texts and draws; and over many draws it is the Fisher form."""
    model, tokens = in_float64(kind, name), TOKENS[:2, :5]
    table = effects(model, {"zero": ablate_heads(model, None)}, tokens=tokens, draws=600, exact=0)
    brute = [
        fisher_form(model, tokens, layer, head, lambda x: -x) / 2 / tokens[:, 1:].numel()
        for layer in (0, 1)
        for head in range(8)
    ]
    ratios = table["curvature"].to_numpy() / np.array(brute)
    assert np.abs(ratios - 1).max() < 0.3  # each has an error of sqrt(2 / 1200) = 4 % or, with few labels, more
    assert abs(ratios.mean() - 1) < 0.05


@pytest.mark.parametrize("n", [1, 4000])
def test_labels_are_drawn_from_the_predictions(n: int) -> None:
    p = torch.tensor([[[0.5, 0.2, 0.0, 0.3], [0.0, 0.0, 1.0, 0.0]]], dtype=torch.float64)
    u = (torch.arange(n, dtype=torch.float64) + 0.5)[:, None, None].expand(n, 1, 2) / n
    labels = drawn_labels(p.log(), u)
    assert labels.shape == (n, 1, 2)
    assert (labels[:, 0, 1] == 2).all()
    if n > 1:
        assert (labels[:, 0, 0].bincount(minlength=4) / n).tolist() == pytest.approx([0.5, 0.2, 0.0, 0.3], abs=1e-3)


# --- interventions --------------------------------------------------------------------------------------------


@FEW
def test_rows_are_those_of_the_heads_that_change(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    both = ablate_heads(model, [(1, 3), (0, 2)]) + substitute_attention(model, "uniform", layers=1, heads=[3, 5])
    table = effects(model, {"both": both, "one": ablate_heads(model, [(1, 7)])}, layers=1)
    assert table[["intervention", "layer", "head"]].values.tolist() == [["both", 1, 3], ["both", 1, 5], ["one", 1, 7]]
    alone = effects(model, ablate_heads(model, [(1, 7), (0, 0)]))
    assert alone["intervention"].tolist() == ["ablate_heads(zero)"] * 2
    assert alone["first"].iloc[1] == pytest.approx(table["first"].iloc[2], abs=1e-7)


@FEW
def test_the_user_has_hooks_on_the_model(kind: str, name: str) -> None:
    """Then the changes of results take full passes, under these hooks."""
    model = zoo.load(kind, name)
    plain = effects(model, {"d": dummy_distance(model, 2, heads=[1, 6])}, exact=0)
    model.hook_dict["blocks.0.hook_resid_post"].add_hook(lambda x, hook: 0.7 * x)
    table = effects(model, {"d": dummy_distance(model, 2, heads=[1, 6])}, exact="all")
    assert (table["first"] - plain["first"]).abs().max() > 1e-4
    loop = []
    for layer, head in zip(table["layer"], table["head"], strict=True):
        with torch.no_grad():
            before = losses(model(TOKENS), TOKENS)
            with model.hooks(fwd_hooks=dummy_distance(model, 2, layers=[int(layer)], heads=[int(head)])):
                loop.append((losses(model(TOKENS), TOKENS) - before).mean().item())
    assert table["exact"].tolist() == pytest.approx(loop, abs=CLOSE)


@pytest.mark.parametrize("read_out", ["mean", "last"])
def test_models_that_predict_a_class(read_out: str) -> None:
    """One prediction for each text: with a metric of the class, and curvature from labels of classes."""
    model, answers = small_model(read_out=read_out).double(), torch.tensor([1, 0, 4])
    tokens = TOKENS % 20

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, answers, reduction="none")

    table = effects(model, {"less": scaled(model, 1 - 1e-3)}, loss, tokens=tokens, exact=6, draws=800)
    assert table["first"].tolist() == pytest.approx(table["exact"].tolist(), rel=0.05, abs=1e-7)
    assert table["curvature"].tolist() == pytest.approx(table["kl"].tolist(), rel=0.3)


# --- the largest, and the others of each layer ------------------------------------------------------------------


@FEW
def test_the_largest_by_curvature_are_run_and_the_others_are_bounded(kind: str, name: str, shared_model: Any) -> None:
    """The bound is what TransformerLens's own runs give for the heads that were not run, together layer by layer."""
    model = shared_model(kind, name)
    hooks = some_interventions(model)
    table, whole = effects(model, hooks, exact=2, draws=4), effects(model, hooks, exact="all", draws=4)
    with torch.no_grad():
        clean = model(TOKENS)
    for intervention, rows in table.groupby("intervention"):
        runs, truth, run = table.attrs["runs"][intervention], whole["kl"][rows.index], rows["kl"].notna()
        assert set(rows["curvature"].nlargest(8).index) <= set(rows.index[run])
        assert rows["kl"][run].tolist() == pytest.approx(truth[run].tolist(), abs=1e-6)
        assert (runs["heads"], runs["run"]) == (16, run.sum())
        together = []
        for layer, others in rows[~run].groupby("layer"):
            assert len(others) > 1  # a head that is left is run
            chosen = {"heads": others["head"].tolist(), "layers": [layer]}
            with torch.no_grad(), model.hooks(fwd_hooks=some_interventions(model, **chosen)[intervention]):
                together.append(divergences(clean, model(TOKENS)).mean().item())
        assert runs["bound"] == pytest.approx(max(together), abs=1e-6)
        largest = table.loc[rows["kl"].idxmax()]
        assert runs["largest"] == f"L{largest['layer']}H{largest['head']}"
        assert f"{runs['largest']} diverges most, by {largest['kl']:.2g} nats per prediction; " in runs["statement"]
    assert effects(model, hooks, exact=2, draws=4).equals(table)
    assert not effects(model, hooks, exact=2, seed=1)["curvature"].equals(table["curvature"])


def cancelling_model() -> Any:
    """In layer 1, heads 1, 3 and 5 have the patterns and z of 0, 2 and 4, and opposite outputs; all are small beside
    those of four heads of layer 0."""
    model = small_model(n_layers=2, n_heads=6, read_out="token", n_out=20, causal=True)
    attn = model.blocks[1].attn
    for weight in (attn.W_Q, attn.W_K, attn.W_V, attn.b_Q, attn.b_K, attn.b_V):
        weight.data[1::2] = weight.data[::2]
    attn.W_O.data /= 4
    attn.W_O.data[1::2] = -attn.W_O.data[::2]
    model.blocks[0].attn.W_O.data[4:] /= 100
    return model


def test_heads_that_cancel_are_what_the_statement_excepts() -> None:
    """Changed together they change nothing, so that each alone exceeds the bound."""
    model = cancelling_model()
    zero = {"zero": ablate_heads(model, None)}
    whole, table = (effects(model, zero, tokens=TOKENS % 20, exact=exact, draws=8) for exact in ("all", 1))
    others = table["kl"].isna()
    assert table[~others][["layer", "head"]].values.tolist() == [[0, head] for head in range(4)]
    runs = table.attrs["runs"]["zero"]
    assert (whole["kl"][whole["layer"] == 1] > 10 * runs["bound"]).all()
    assert runs["statement"].endswith(", unless heads of one layer cancel")


def test_nothing_is_run_or_drawn_that_was_not_asked_for(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    zero = ablate_heads(model, None)
    table = effects(model, zero, draws=0, exact=0, tokens=TOKENS[:1])
    assert table[["curvature", "exact", "kl"]].isna().all(axis=None)
    assert not any(name.endswith("_se") for name in table)  # of one text
    several = effects(model, zero, draws=0, exact=0)
    assert set(several) - set(table) == {f"{name}_se" for name in ("first", "curvature", "estimate", "exact", "kl")}
    assert table["estimate"].equals(table["first"])
    (runs,) = table.attrs["runs"].values()
    assert (runs["run"], runs["largest"], runs["statement"]) == (0, "", "0 of 16 heads were run")
    assert np.isnan(runs["bound"])
    few = effects(model, zero, exact=1, draws=0)
    assert few["exact"].notna().sum() == 4
    assert set(few["first"].abs().nlargest(4).index) == set(few.index[few["exact"].notna()])
    (runs,) = effects(model, zero, exact="all").attrs["runs"].values()
    assert (runs["run"], runs["bound"]) == (16, 0.0)
    assert runs["statement"].startswith("16 of 16 heads were run: ")
    assert "unless" not in runs["statement"]


@pytest.mark.parametrize("exact", [0, 2, "all"])
def test_passes_are_those_that_are_made(exact: Any, shared_model: Any) -> None:
    """Counted from outside: tokens that reach the values of each layer."""
    model = shared_model("bridge", "llama-gqa")
    counted: list[int] = []
    points = [model.hook_dict[f"blocks.{layer}.attn.hook_v"] for layer in (0, 1)]
    handles = [x.register_forward_hook(lambda part, args, v: counted.append(args[0].shape[:2].numel())) for x in points]
    try:
        table = effects(model, {"zero": ablate_heads(model, None)}, exact=exact, draws=3)
    finally:
        for handle in handles:
            handle.remove()
    forward = sum(counted) / len(points) / TOKENS.numel()
    assert table.attrs["passes"] == pytest.approx(forward + 2 * (1 + 3))


# --- the model ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_gradients_in_every_mode() -> None:
    """In a block without gradients, of a model without any, and in inference mode; none is left on a parameter."""
    model = zoo.load("bridge", "llama-gqa")
    parameters = list(model.parameters())
    table = effects(model, ablate_heads(model, None))
    for x in parameters:
        x.requires_grad_(False)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            pd.testing.assert_frame_equal(effects(model, ablate_heads(model, None)), table)
    assert not any(x.requires_grad or x.grad is not None for x in parameters)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    zero = ablate_heads(model, None)
    own = [("blocks.1.attn.hook_z", lambda z, hook: 0 * z)]
    two = torch.arange(9).expand(2, 9) * 2  # for a batch of two texts
    by_text = {
        "positions": swap_positions(model, two),
        "distances": remap_distance(model, two[:, None, :, None] - two[:, None, None]),
        "cells": knock_out(model, cells=torch.zeros(2, 9, 9, dtype=torch.bool)),
    }
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({}, {}, "must be hooks by name, .* of this package, got {}; intervention_losses takes hooks of your own"),
        (own, {}, "must be hooks by name, .*; intervention_losses takes hooks of your own as well, by name"),
        ({"x": []}, {}, "must have hooks"),
        ({"x": [("no hook", print)]}, {}, "names 'no hook'"),
        ({"x": "ablate_heads"}, {}, "'x': hooks must be a list of"),
        ({"x": zero, "y": ablate_heads(model, [(0, 1)])}, {"layers": 1}, "must act on the chosen heads"),
        ({"x": own}, {}, "got functions of your own.*intervention_losses runs the model under any hooks"),
        ({"x": zero + own}, {}, "got functions of your own"),
        ({"x": ablate_heads(model, None, mode="resample")}, {}, "\"resample\", for 'x'"),
        *(({"x": hooks}, {}, "tensors for the texts of a batch, .*, for 'x'") for hooks in by_text.values()),
    ]
    for interventions, options, message in cases:
        with pytest.raises(ArgumentError, match=message) as caught:
            effects(model, interventions, **options)
        assert caught.value.argument == "interventions"
    for wrong in (-1, 1.5, "some", None):
        with pytest.raises(ArgumentError, match=f"exact must be .* got {wrong!r}"):
            effects(model, zero, exact=wrong)
    metrics: list[Any] = [
        lambda logits, tokens: logits.detach().mean(),
        lambda logits, tokens: 3.0,
        lambda logits, tokens: logits,
    ]
    for metric in metrics:
        with pytest.raises(ValueError, match="metric must"):
            effects(model, zero, metric)
    with torch.no_grad():
        clean = model(TOKENS)

    def of_small_changes(logits: Tensor, tokens: Tensor) -> Tensor:
        return (1e-8 - (logits - clean).square().mean((1, 2))).sqrt()

    with pytest.raises(ValueError, match="interventions must leave outputs that can be measured; 'zero' at L0H0: "):
        effects(model, {"zero": zero}, of_small_changes)


@pytest.mark.usefixtures("unchecked")
def test_draws_need_predictions() -> None:
    model = small_model(read_out="token", n_out=5).double()
    tokens, zero = TOKENS % 20, ablate_heads(model, None)
    assert logits_of(torch.zeros(2, 3, 4, 5), TOKENS) is None

    def mean(logits: Any, tokens: Tensor) -> Tensor:
        return logits.mean((1, 2))

    assert (effects(model, zero, mean, tokens=tokens)["curvature"] > 0).all()  # a class for each token
    model.forward = lambda tokens: type(model).forward(model, tokens)[..., None]  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"draws must be 0 for a model that returns neither logits .* got \(3, 9, 5, 1\)"
    ):
        effects(model, zero, lambda x, tokens: x.mean((1, 2, 3)), tokens=tokens)
    table = effects(model, zero, lambda x, tokens: x.mean((1, 2, 3)), tokens=tokens, draws=0, exact=1)
    assert table["kl"].isna().all()
    assert table["exact"].notna().sum() == 4
    (runs,) = table.attrs["runs"].values()
    assert runs["statement"] == "4 of 6 heads were run, and nothing limits the effects of the others"
