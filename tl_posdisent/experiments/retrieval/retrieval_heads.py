"""Heads that fetch the word that a question asks for from a needle in a long text, and whether the model needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.result_gradients import result_gradients
from tl_posdisent.experiments.measuring.runs import run_under
from tl_posdisent.experiments.retrieval.needles import Needles
from tl_posdisent.hooks.ablate import ablate_heads, check_reach
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_choice, check_integer, check_seed, listed, shown

Score = Literal["copying", "attention"]
Head = tuple[int, int]
_TOKENS, _TOKENS_WITH_GRADIENTS = 1024, 256  # of short texts that share a pass
_N_RANDOM_SIGNS = 9999  # random signs of the permutation test


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalHeads:
    """Scores of heads, and what the model loses without the first of them.

    Attributes:
        heads: one row per head, the largest first: ``layer``, ``head``, ``copying``, ``copying_se``, ``attention``,
            ``attention_se``; the errors are standard errors over pairs of texts.
        knockout: one row per set of ``ablated`` heads (``"none"``; ``"top"``, the first; ``"random"``, as many others
            of the same layers, mean over draws) and ``depth`` of the needle (NaN: all). ``difference`` is the logit of
            the answer minus that of the decoy, ``se`` its standard error over pairs (by depth: over texts), ``right``
            the share of texts in which it is positive, ``sd`` the standard deviation over draws, ``p`` the level of the
            permutation test.
    """

    heads: pd.DataFrame
    knockout: pd.DataFrame

    def top(self, n: int) -> list[Head]:
        """Return the first n heads, at most half of each layer's, as pairs ``(layer, head)``."""
        return _top(self.heads, n)

    def __repr__(self) -> str:
        whole = self.knockout[self.knockout["depth"].isna()].set_index("ablated")["difference"]
        differences = ", ".join(f"{ablated} {whole[ablated]:.2f}" for ablated in whole.index)
        return f"RetrievalHeads: {len(self.heads)} heads; answer - decoy by ablated heads: {differences}"


def retrieval_heads(
    model: Any,
    needles: Needles,
    heldout: Needles,
    *,
    layers: Layers = None,
    by: Score = "copying",
    count: int = 8,
    draws: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> RetrievalHeads:
    """Score heads by how they retrieve a needle's word, and ablate the first against others of the same layers.

    The two texts of a pair differ only in which of two needles the question asks for (``Needles``). Each score is
    antisymmetric under that exchange, so a head that looks at a place, a distance or a word has an expected score of 0:

    * ``attention``: attention from the last token to the answer minus that to the decoy, mean over the pair. A score
      above 0.1 is the criterion of retrieval heads in arXiv 2404.15574.
    * ``copying``: ``(g + g')/2 · (z - z')``, where z and z' are the head's results at the last token in the two texts,
      and g and g' the gradients there of logit(answer) - logit(decoy) of the first text: by how much this difference
      is estimated to fall, in logits, if the head's result came from the other text (attribution patching by the
      trapezoid rule; exact if the difference is a quadratic function on the line from one run to the other). It is
      positive for a head that helps to find the answer.

    The first heads by a score in ``needles``, at most half of each layer's, are replaced in the ``heldout`` texts by
    their mean outputs over ``needles``; then as many other heads of each of their layers, drawn at random. ``p`` is the
    one-sided level of a permutation test: signs of the pairs' differences between the random heads' mean and the first
    heads are exchanged at random. The cost is five forward passes of each text of ``needles`` (two of them backward),
    and ``2 + draws`` of each held-out text.

    Args:
        model: a causal HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        needles: the texts by which heads are scored (``needle_texts``).
        heldout: other texts, of any length, in which heads are ablated.
        layers: default all that have attention.
        by: the score by which heads are ordered: ``"copying"`` or ``"attention"``.
        count: number of heads that are ablated together.
        draws: number of draws of other heads.
        seed: seed of the draws and of the permutation test.
        progress: show a progress bar over scores and sets.

    Raises:
        ValueError: invalid arguments; a model that is not causal; more heads than half of all; an output without
            gradients.

    Example:
        >>> from tl_posdisent import load_demo_model, retrieval_heads
        >>> from tl_posdisent.experiments import needle_texts
        >>> model = load_demo_model()
        >>> first, second = (needle_texts(model, length=160, pairs=3, depths=3, seed=seed) for seed in (0, 1))
        >>> found = retrieval_heads(model, first, second, count=4, draws=2, progress=False)
        >>> found  # the demo model does not retrieve
        RetrievalHeads: 40 heads; answer - decoy by ablated heads: none ..., top ..., random ...
        >>> len(found.top(4))
        4
    """
    check_choice("by", by, get_args(Score))
    check_integer("draws", draws, 1)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, specs = reading.model, sorted(reading.specs(layers), key=lambda spec: spec.layer)
    if not all(spec.causal for spec in specs):
        raise ArgumentError("model", "must be causal, got one whose tokens see later ones")
    check_integer("count", count, 1, sum(spec.n_heads // 2 for spec in specs))
    needles, heldout = _checked(model, "needles", needles), _checked(model, "heldout", heldout)
    check_reach(reading, [spec.layer for spec in specs])
    with tqdm(total=4 + draws, desc="scores and sets", disable=not progress) as bar:
        heads = _scores(model, needles, specs, bar)
        heads = heads.sort_values(by, ascending=False, kind="stable", ignore_index=True)
        top, generator = _top(heads, count), np.random.default_rng(seed)

        def difference(ablated: list[Head]) -> Float64[Tensor, " text"]:
            hooks = ablate_heads(reading, ablated, mode="mean", reference=needles.tokens) if ablated else []
            bar.update()
            return needle_differences(model, heldout, hooks)

        random = torch.stack([difference(_others(heads, top, generator)) for _ in range(draws)])
        differences = {"none": difference([])[None], "top": difference(top)[None], "random": random}
    return RetrievalHeads(reading.note(heads), reading.note(_knockout(heldout, differences, seed)))


def _checked(model: Any, name: str, needles: Any) -> Needles:
    """Return needles on the model's device; raise unless they are needles that fit it."""
    if not isinstance(needles, Needles):
        raise ArgumentError(name, f"must be Needles (needle_texts), got {shown(needles)}")
    with naming(tokens=name):
        tokens = read_texts(model, needles.tokens, torch.ones_like(needles.tokens)).tokens
    return Needles(tokens, needles.places, needles.depths)


def _scores(model: Any, needles: Needles, specs: Sequence[AttentionSpec], bar: Any) -> pd.DataFrame:
    """Tabulate both scores of each head, means over pairs, and their standard errors."""
    names = [(spec.layer, head) for spec in specs for head in range(spec.n_heads)]
    table = pd.DataFrame(names, columns=["layer", "head"])
    for name, score, n_tokens in (("copying", _copying, _TOKENS_WITH_GRADIENTS), ("attention", _attention, _TOKENS)):
        values = torch.cat([score(model, part, specs) for part in needles.split(n_tokens)])
        table[name] = values.mean(0).numpy()
        if len(values) > 1:
            table[f"{name}_se"] = _error(values).numpy()
        bar.update()
    return table


def _attention(model: Any, needles: Needles, specs: Sequence[AttentionSpec]) -> Float64[Tensor, "pair head"]:
    """Compute the attention of the last token to the answer minus that to the decoy, mean over each pair."""
    by_layer = dict[int, Tensor]()

    def note(spec: AttentionSpec, pattern: Pattern) -> None:
        last = pattern[:, :, -1].double().cpu()
        to_words = last.gather(2, needles.places.cpu()[:, None].expand(-1, last.shape[1], -1))
        by_layer[spec.layer] = to_words[..., 0] - to_words[..., 1]

    for_each_pattern(model, needles.tokens, specs, note)
    texts = torch.cat([by_layer[spec.layer] for spec in specs], 1)
    return (texts[::2] + texts[1::2]) / 2


def _copying(model: Any, needles: Needles, specs: Sequence[AttentionSpec]) -> Float64[Tensor, "pair head"]:
    """Estimate by how much the metric falls if the result of each head at the last token came from the other text."""
    layers, metric = [spec.layer for spec in specs], needles.metric
    with torch.inference_mode(False):  # tensors made in inference mode cannot take part in a gradient
        tokens = needles.tokens.clone()
        no_labels = torch.empty(0, *tokens.shape, dtype=torch.float64, device="cpu")
        (run,) = result_gradients(model, [tokens], layers, lambda outputs: metric(outputs[0]).sum(), [no_labels])

    def at_end(by_layer: Mapping[int, Tensor]) -> Float64[Tensor, "text head d_head"]:
        last = [by_layer[spec.layer][:, -1].reshape(len(tokens), spec.n_heads, -1) for spec in specs]
        return torch.cat([x.double().cpu() for x in last], 1)

    z, gradient = at_end(run.z), at_end(run.metric)
    # The metric of a pair's second text is that of its first with the sign exchanged, and so is its gradient.
    fall: Tensor = ((gradient[::2] - gradient[1::2]) / 2 * (z[::2] - z[1::2])).sum(-1)
    return fall


def needle_differences(model: Any, needles: Needles, hooks: Sequence[Hook] = ()) -> Float64[Tensor, " text"]:
    """Compute logit(answer) - logit(decoy) of each text under hooks; one forward pass for each text."""
    parts = needles.split(_TOKENS)
    return torch.cat([part.metric(run_under(model, part.tokens, hooks)).double().cpu() for part in parts])


def _top(heads: pd.DataFrame, n: int) -> list[Head]:
    """Take the first n heads, at most half of each layer's, so that each layer has as many others."""
    room = (heads["layer"].value_counts() // 2).to_dict()
    check_integer("n", n, 0, sum(room.values()))
    top: list[Head] = []
    for layer, head in zip(heads["layer"], heads["head"], strict=True):
        if len(top) < n and room[layer]:
            top.append((int(layer), int(head)))
            room[layer] -= 1
    return top


def _others(heads: pd.DataFrame, top: Sequence[Head], generator: np.random.Generator) -> list[Head]:
    """Draw as many other heads of each layer as it has among the first."""
    drawn: list[Head] = []
    for layer in sorted({layer for layer, _ in top}):
        first = {head for x, head in top if x == layer}
        rest = sorted({*heads.loc[heads["layer"] == layer, "head"].tolist()} - first)
        drawn += [(layer, int(head)) for head in generator.choice(rest, len(first), replace=False)]
    return drawn


def _knockout(needles: Needles, differences: Mapping[str, Float64[Tensor, "draw text"]], seed: int) -> pd.DataFrame:
    """Tabulate the differences of all texts, and of those with the needle at each depth, by ablated heads."""
    p = _level(_pair_means(differences["random"].mean(0) - differences["top"][0]), seed)
    rows = list[dict[str, Any]]()
    for name, values in differences.items():
        for depth in (nan, *sorted({*needles.depths.tolist()})):
            whole = isnan(depth)
            texts = values if whole else values[:, needles.depths == depth]
            units = _pair_means(texts) if whole else texts
            row = {"depth": depth, "ablated": name, "difference": units.mean().item()}
            row |= {"se": _error(units.mean(0)).item(), "right": (texts > 0).double().mean().item()}
            row |= {"sd": _deviation(units.mean(1)).item(), "p": p if whole and name == "top" else nan}
            rows.append(row)
    table = pd.DataFrame(rows)
    return table.drop(columns="se") if table["se"].isna().all() else table


def _pair_means(values: Float64[Tensor, "*row text"]) -> Float64[Tensor, "*row pair"]:
    pairs: Tensor = values.unflatten(-1, (-1, 2)).mean(-1)
    return pairs


def _deviation(values: Float64[Tensor, " *_shape"]) -> Tensor:
    """Compute the standard deviation over the first axis; NaN of a single row."""
    return values.std(0) if len(values) > 1 else values[0] * nan


def _error(values: Float64[Tensor, " *_shape"]) -> Tensor:
    """Compute the standard error of the mean over the first axis."""
    error: Tensor = _deviation(values) / len(values) ** 0.5
    return error


def _level(drops: Float64[Tensor, " pair"], seed: int) -> float:
    """Compute the share of random signs under which the mean is as large, the actual ones among them."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (_N_RANDOM_SIGNS, len(drops)), generator=generator, device="cpu").double() * 2 - 1
    as_large = (signs * drops).mean(1) >= drops.mean() - 1e-12
    return (1 + int(as_large.sum())) / (1 + _N_RANDOM_SIGNS)
