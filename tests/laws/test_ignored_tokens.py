"""Predictions of ignored tokens count in no table of losses and divergences.

Each number equals the mean over the other predictions of all texts, each run alone with plain hooks, with
log-probabilities in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import experiments as ex
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.hooks import substitute_attention

LENGTHS = [9, 14, 11]
TEXTS = [zoo.random_tokens(n, batch=1, seed=i) for i, n in enumerate(LENGTHS)]
OTHERS = [zoo.random_tokens(n, batch=1, seed=10 + i) for i, n in enumerate(LENGTHS)]
IGNORED = [int(TEXTS[0][0, 0]), int(TEXTS[1][0, 5]), int(TEXTS[2][0, -3])]
PLACES = torch.arange(14) * 2
ONE: dict[str, Any] = {"layers": 0, "heads": 5}
QUIET: dict[str, Any] = {"progress": False}
CLOSE = rounding(log(61), 2)  # of the difference of two losses of logits in float32
MODELS = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
LAYOUTS = ["left", "right", "list"]


def laid_out(layout: str, texts: Sequence[Tensor] = TEXTS) -> Any:
    """The texts as a list, or as a tokenizer pads them."""
    if layout == "list":
        return [text[0] for text in texts]
    ends = [(14 - n, 0) if layout == "left" else (0, 14 - n) for n in LENGTHS]
    pad = torch.nn.functional.pad
    ids = torch.cat([pad(x, end) for x, end in zip(texts, ends, strict=True)])
    real = torch.cat([pad(torch.ones_like(x), end) for x, end in zip(texts, ends, strict=True)])
    return {"input_ids": ids, "attention_mask": real}


def kept(x: Tensor) -> Tensor:
    """Where the prediction of the next token counts."""
    return torch.tensor([int(token) not in IGNORED for token in x[0, :-1]])


class Means:
    """Means over the predictions that count, of texts run one by one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.clean = self.log_p(lambda n: [])

    def log_p(self, hooks: Callable[[int], list[Any]], read: Sequence[Tensor] = TEXTS) -> list[Tensor]:
        """Log-probabilities of each text, or of others in their place, under the hooks for texts of this length."""
        with torch.no_grad():
            return [
                self.model.run_with_hooks(text, fwd_hooks=hooks(text.shape[1]))[0, :-1].double().log_softmax(-1)
                for text in read
            ]

    def of(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], log_p: Sequence[Tensor]) -> float:
        """The mean of a measure of clean and other log-probabilities and of the next tokens."""
        each = zip(self.clean, log_p, TEXTS, strict=True)
        values = torch.cat([measure(p, q, text[0, 1:])[kept(text)] for p, q, text in each])
        return float(values.double().mean())

    def loss(self, log_p: Sequence[Tensor]) -> float:
        return self.of(lambda p, q, following: -q.gather(-1, following[:, None])[:, 0], log_p)

    def kl(self, log_p: Sequence[Tensor]) -> float:
        return self.of(lambda p, q, following: (p.exp() * (p - q)).sum(-1), log_p)

    def accuracy(self, log_p: Sequence[Tensor]) -> float:
        return self.of(lambda p, q, following: q.argmax(-1) == following, log_p)


def result_hook(layer: int, head: int, put: Callable[[Tensor], Any]) -> tuple[str, Any]:
    """Replace a head's result by a function of it."""

    def hook(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, head] = put(z[:, :, head])
        return z

    return f"blocks.{layer}.attn.hook_z", hook


def z_of(model: Any, text: Tensor, layer: int, head: int) -> Tensor:
    """A head's results in a text."""
    with torch.no_grad():
        z: Tensor = model.run_with_cache(text)[1][f"blocks.{layer}.attn.hook_z"]
    return z[:, :, head]


def mean_result(model: Any, layer: int, head: int) -> Tensor:
    """The mean of a head's results over the tokens that are not ignored."""
    of_texts = [z_of(model, text, layer, head)[~torch.isin(text, torch.tensor(IGNORED))] for text in TEXTS]
    return torch.cat(of_texts).double().mean(0).float()


def close(found: Any, expected: Any) -> None:
    assert list(found) == pytest.approx(list(expected), abs=CLOSE)


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_head_ablation(kind: str, name: str, layout: str, mode: Any, shared_model: Any) -> None:
    """Also the mean output is that of tokens that are not ignored."""
    model = shared_model(kind, name)
    row = tp.head_ablation(model, laid_out(layout), mode=mode, ignore=IGNORED, **ONE, **QUIET).iloc[0]
    runs, output = Means(model), mean_result(model, 0, 5) if mode == "mean" else torch.zeros(())
    value = runs.loss(runs.log_p(lambda n: [result_hook(0, 5, lambda z: output)]))
    close(row[["baseline", "value"]], [runs.loss(runs.clean), value])
    everything = tp.head_ablation(model, laid_out(layout), mode=mode, **ONE, **QUIET).iloc[0]
    assert abs(everything["effect"] - row["effect"]) > 10 * CLOSE
    if mode == "mean":
        given = tp.head_ablation(
            model, laid_out(layout), mode=mode, reference=laid_out("list"), ignore=IGNORED, **ONE, **QUIET
        )
        close(given.iloc[0][["value"]], [value])


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_effects_and_losses_of_interventions(kind: str, name: str, layout: str, shared_model: Any) -> None:
    model, tokens = shared_model(kind, name), laid_out(layout)
    hooks = {"5": tp.dummy_distance(model, 5, **ONE)}
    runs = Means(model)
    changed = runs.log_p(lambda n: hooks["5"])
    row = tp.head_effects(model, tokens, hooks, exact="all", draws=1, ignore=IGNORED, **QUIET).iloc[0]
    added, kl = runs.loss(changed) - runs.loss(runs.clean), runs.kl(changed)
    close(row[["exact", "kl"]], [added, kl])
    table = ex.intervention_losses(model, tokens, hooks, ignore=IGNORED, **QUIET)
    losses = [runs.loss(runs.clean), runs.loss(changed)]
    close(table["loss"], losses)
    close(table["added_loss"], [0, added])
    close(table["kl"], [0, kl])
    assert table["accuracy"].tolist() == pytest.approx([runs.accuracy(runs.clean), runs.accuracy(changed)])
    everything = ex.intervention_losses(model, tokens, hooks, **QUIET)
    assert (everything["loss"] - table["loss"]).abs().min() > 10 * CLOSE


def scaled(layer: int, head: int, by: float) -> Callable[[int], list[Any]]:
    return lambda n: [result_hook(layer, head, lambda z: by * z)]


def fisher_form(runs: Means, layer: int, head: int) -> float:
    """δᵀFδ of a head without its result, all labels enumerated: log-probabilities differentiated by differences."""
    step = 3e-3
    up, down = (runs.log_p(scaled(layer, head, 1 + x)) for x in (step, -step))
    slopes = [(a - b) / (2 * step) for a, b in zip(up, down, strict=True)]
    return runs.of(lambda p, slope, following: (p.exp() * slope.square()).sum(-1), slopes)


@MODELS
def test_curvature_is_half_the_fisher_form_of_the_other_predictions(kind: str, name: str) -> None:
    """To five standard errors of one head's mean over draws and texts."""
    model = zoo.load(kind, name).double()
    zero = {"zero": tp.ablate_heads(model, None)}
    table = tp.head_effects(model, laid_out("list"), zero, draws=400, exact=0, ignore=IGNORED, **QUIET)
    forms = [fisher_form(Means(model), *head) for head in zip(table["layer"], table["head"], strict=True)]
    assert (2 * table["curvature"] / forms - 1).abs().max() < 5 * (2 / (400 * len(TEXTS))) ** 0.5


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ladder(kind: str, name: str, layout: str, shared_model: Any) -> None:
    model, runs = shared_model(kind, name), Means(shared_model(kind, name))
    table = tp.attention_ladder(
        model, laid_out(layout), rungs=["uniform"], controls=[], ignore=IGNORED, **ONE, **QUIET
    ).set_index("rung")
    output, uniform = mean_result(model, 0, 5), substitute_attention(model, "uniform", **ONE)
    expected = {
        "mean_output": runs.log_p(lambda n: [result_hook(0, 5, lambda z: output)]),
        "uniform": runs.log_p(lambda n: uniform),
        "untouched": runs.clean,
    }
    close(table["loss"], [runs.loss(expected[rung]) for rung in table.index])
    close(table["kl"], [runs.kl(expected[rung]) for rung in table.index])


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_patching(kind: str, name: str, layout: str, shared_model: Any) -> None:
    """In layer 0 a patch is the other run's positions, in all other heads or in the patched one.

    Positions are the same for all texts, or laid out like a padded batch.
    """
    model, tokens, runs = shared_model(kind, name), laid_out(layout), Means(shared_model(kind, name))
    places = laid_out("left", [PLACES[None, :n] for n in LENGTHS])["input_ids"] if layout == "left" else PLACES
    swapped, later, head = (
        lambda n, some=some: tp.swap_positions(model, PLACES[:n], **some)
        for some in ({}, {"layers": 1}, {"layers": 0, "heads": 5})
    )
    options: dict[str, Any] = {"layers": 0, "ignore": IGNORED} | QUIET
    corrupted = runs.loss(runs.log_p(swapped))
    row = tp.position_patching(model, tokens, places, what="layer", **options).iloc[0]
    clean = runs.loss(runs.clean)
    close(row[["clean", "corrupted", "value"]], [clean, corrupted, runs.loss(runs.log_p(later))])
    parts: Any = ["mean", "distance", "query", "key", "residual"]
    row = tp.component_patching(model, tokens, parts, source_positions=places, heads=5, **options).iloc[0]
    close(row[["baseline", "source", "value"]], [clean, corrupted, runs.loss(runs.log_p(head))])
    row = tp.head_patching(model, laid_out(layout, OTHERS), tokens, next_token_loss, heads=5, **options).iloc[0]
    results = {text.shape[1]: z_of(model, text, 0, 5) for text in TEXTS}
    patched = runs.log_p(lambda n: [result_hook(0, 5, lambda z: results[n])], OTHERS)
    baseline = runs.loss(runs.log_p(lambda n: [], OTHERS))
    close(row[["source", "baseline", "value"]], [clean, baseline, runs.loss(patched)])


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_robustness(kind: str, name: str, layout: str, shared_model: Any) -> None:
    model, tokens, runs = shared_model(kind, name), laid_out(layout), Means(shared_model(kind, name))
    row = ex.perturbation_curve(model, tokens, ["order"], [0.5], [3], ignore=IGNORED, **QUIET).iloc[0]
    perturbed = [ex.perturb(model, text, "order", 0.5, seed=3) for text in TEXTS]
    log_p = runs.log_p(lambda n: [], [x.tokens for x in perturbed])
    losses, added, kl, right = [], [], [], []
    for p, q, text, x in zip(runs.clean, log_p, TEXTS, perturbed, strict=True):
        following, counted = x.tokens[0, 1:], kept(text)
        intact = counted & x.intact[0]
        losses.append(-q.gather(-1, following[:, None])[counted, 0])
        right.append((q.argmax(-1) == following)[counted].double())
        added.append((p - q).gather(-1, following[:, None])[intact, 0])
        kl.append((p.exp() * (p - q)).sum(-1)[intact])
    expected = [float(torch.cat(x).mean()) for x in (losses, right, added, kl)]
    close(row[["accuracy", "added_loss", "kl"]], expected[1:])
    assert log(row["perplexity"]) == pytest.approx(expected[0], abs=CLOSE)
    assert row["moved"] == pytest.approx(float(torch.cat([x.moved[0] for x in perturbed]).double().mean()))

    table = ex.length_generalization(model, tokens, [1, 5, 9], ignore=IGNORED, **QUIET)
    for start, stop, loss in table[["start", "stop", "loss"]].itertuples(index=False):
        some = [
            -p[start:stop].gather(-1, text[0, start + 1 : stop + 1, None])[kept(text)[start:stop], 0]
            for p, text in zip(runs.clean, TEXTS, strict=True)
        ]
        assert loss == pytest.approx(float(torch.cat(some).mean()), abs=CLOSE)


@pytest.mark.parametrize("ignore", [[60], *slow([None, []])])
def test_what_ignores_nothing_changes_nothing(ignore: Any, shared_model: Any) -> None:
    """To the bit."""
    model, tokens = shared_model("bridge", "llama-gqa"), laid_out("right")
    assert not any((text == 60).any() for text in TEXTS)
    hooks = {"5": tp.dummy_distance(model, 5)}
    calls: list[Callable[..., pd.DataFrame]] = [
        lambda **more: tp.head_ablation(model, tokens, mode="mean", **more),
        lambda **more: tp.head_effects(model, tokens, hooks, draws=3, exact=1, **more),
        lambda **more: tp.attention_ladder(model, tokens, controls=[], **ONE, **more),
        lambda **more: ex.intervention_losses(model, tokens, hooks, **more),
    ]
    for call in calls:
        pd.testing.assert_frame_equal(call(ignore=ignore, **QUIET), call(**QUIET), check_exact=True)
