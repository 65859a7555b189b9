"""Heads that fetch the word that a question asks for from a needle in a long text, and whether the model needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.metrics import Metric
from tl_posdisent.experiments.measuring.result_gradients import result_gradients
from tl_posdisent.experiments.measuring.text_parts import TOKENS
from tl_posdisent.experiments.retrieval.needles import (
    Needles,
    check_needles,
    needle_attention,
    needle_differences,
    needle_texts,
    parts_of_needles,
)
from tl_posdisent.hooks.ablate import ablate_heads, check_reach
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_choice, check_counts, check_integer, check_seed, listed, shown

By = Literal["copying", "attention"]
Mode = Literal["mean", "zero"]
Head = tuple[int, int]
_SIGNS = 9999  # random signs of a permutation test


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalHeads(HasTable):
    """Scores of heads, and what the model loses without the first of them.

    Attributes:
        heads: one row per head, the largest first: ``layer``, ``head``, ``copying`` (the estimated fall of the logit of
            the answer minus that of the decoy if the head's result came from the other text), ``copying_se``,
            ``attention``, ``attention_se``. The errors are standard errors over pairs of texts.
        knockout: one row per length of the held-out texts, depth of the needle (NaN: all), number ``n`` of heads, and
            ``ablated`` heads: ``"none"``, ``"top"`` (the first n) or ``"random"`` (n others of the same layers, mean
            over draws). ``difference`` is the logit of the answer minus that of the decoy, ``se`` its standard error
            over pairs (by depth: over texts), ``right`` the share of texts in which it is positive, ``sd`` the standard
            deviation over draws, ``p`` the level of the permutation test.
        by: the score by which heads are ordered.
    """

    heads: pd.DataFrame
    knockout: pd.DataFrame
    by: By

    def top(self, n: int) -> list[Head]:
        """Return the first n heads, at most half of each layer's, as pairs ``(layer, head)``."""
        return _top(self.heads, n)

    def to_frame(self) -> pd.DataFrame:
        """Return the table of heads."""
        return self.heads

    def __repr__(self) -> str:
        whole = self.knockout[self.knockout["depth"].isna()]
        best = ", ".join(f"L{row.layer}H{row.head} {getattr(row, self.by):.2f}" for row in self.heads[:4].itertuples())
        lines = [f"RetrievalHeads: {len(self.heads)} heads by {self.by}: {best} …"]
        for length, rows in whole.groupby("length"):
            none, *sets = rows.to_dict("records")
            right = f"right in {none['right']:.0%} of texts"
            lines.append(f"  {length} tokens: answer - decoy {none['difference']:.2f} ± {none['se']:.2f}, {right}")
            for top, random in zip(sets[::2], sets[1::2], strict=True):
                cost = f"{top['difference']:.2f} ± {top['se']:.2f}"
                spread = "" if np.isnan(random["sd"]) else f" (sd {random['sd']:.2f})"
                others = f"{random['difference']:.2f}{spread}"
                lines.append(
                    f"    without the first {top['n']}: {cost}, without {top['n']} others: {others}, p = {top['p']:.2g}"
                )
        return "\n".join(lines)


def retrieval_heads(
    model: Any,
    needles: Needles | None = None,
    *,
    heldout: Needles | Collection[Needles] | None = None,
    layers: Layers = None,
    by: By = "copying",
    counts: Collection[int] = (8,),
    draws: int = 10,
    mode: Mode = "mean",
    seed: int = 0,
    progress: bool = True,
) -> RetrievalHeads:
    """Score heads by how they retrieve a needle's word, and ablate the first k against k others of the same layers.

    The two texts of a pair differ only in which of two needles the question asks for (``Needles``). Each score is
    antisymmetric under that exchange, so a head that looks at a place, a distance or a word has an expected score of 0:

    * ``attention``: attention from the last token to the answer minus that to the decoy, mean over the pair. A score
      above 0.1 is the criterion of retrieval heads in arXiv 2404.15574.
    * ``copying``: ``(g + g')/2 · (z - z')``, where z and z' are the head's results at the last token in the two texts,
      and g and g' the gradients there of logit(answer) - logit(decoy) of the first text: by how much this difference
      is estimated to fall, in logits, if the head's result came from the other text (attribution patching by the
      trapezoid rule; exact if the difference is a quadratic function on the line from one run to the other). It is
      positive for a head that helps to find the answer.

    A head can attend to the word and change nothing, or have a part in finding the needle without attending to its
    word. The knock-out shows which score names heads that the model needs. The first k heads are taken by the score in
    ``needles``, at most half of each layer's, and ablated in the ``heldout`` texts; then as many other heads of each of
    their layers, drawn at random. ``p`` is the one-sided level of a permutation test: signs of the pairs' differences
    between the random heads' mean and the first heads are exchanged at random.

    It takes five forward passes of each text of ``needles`` (two of them backward), and one of each held-out text for
    each set: 1 + len(counts) * (1 + draws).

    Args:
        model: a causal HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        needles: the texts by which heads are scored; default ``needle_texts(model, seed=seed)`` of 256 tokens, or as
            many as the model's context has.
        heldout: other texts, in which heads are ablated; several of different lengths, if wanted. Default as
            ``needles``, with the next seed.
        layers: default all that have attention.
        by: the score by which heads are ordered: ``"copying"`` or ``"attention"``.
        counts: numbers k of heads that are ablated together.
        draws: number of draws of other heads.
        mode: ``"mean"`` (over ``needles``) or ``"zero"``, as in ``ablate_heads``.
        seed: seed of default texts, of draws and of the permutation test.
        progress: show a progress bar over texts and sets.

    Raises:
        ValueError: invalid arguments; a model that is not causal; needles of a model without tokenizer that are not
            given; more heads than half of all; an output without gradients.

    Example:
        >>> from tl_posdisent import load_demo_model, retrieval_heads
        >>> from tl_posdisent.experiments import needle_texts
        >>> model = load_demo_model()
        >>> first, second = (needle_texts(model, length=160, pairs=3, depths=3, seed=seed) for seed in (0, 1))
        >>> found = retrieval_heads(model, first, heldout=second, counts=[4], draws=2, progress=False)
        >>> found  # the demo model does not retrieve
        RetrievalHeads: 40 heads by copying: ...
          160 tokens: answer - decoy ..., right in ... of texts
            without the first 4: ..., without 4 others: ...
        >>> len(found.top(4))
        4
    """
    check_choice("by", by, get_args(By))
    check_choice("mode", mode, get_args(Mode))
    check_integer("draws", draws, 1)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    specs = sorted(reading.specs(layers), key=lambda spec: spec.layer)
    if not all(spec.causal for spec in specs):
        raise ArgumentError("model", "must be causal, got one whose tokens see later ones")
    sizes = check_counts(counts, sum(spec.n_heads // 2 for spec in specs))
    needles = _default(reading, seed) if needles is None else check_needles(reading.model, "needles", needles)
    texts = [_default(reading, seed + 1)] if heldout is None else _several(reading, heldout)
    check_reach(reading, [spec.layer for spec in specs])
    passes = len(needles.tokens) + len(texts) * (1 + len(sizes) * (1 + draws))
    with progress_bar(total=passes, desc="texts and sets", disable=not progress) as bar:
        heads = _scores(reading, needles, specs, bar).sort_values(by, ascending=False, kind="stable", ignore_index=True)
        tables = [_knockout(reading, heads, needles, some, sizes, draws, mode, seed, bar) for some in texts]
    return RetrievalHeads(reading.note(heads), reading.note(pd.concat(tables, ignore_index=True)), by)


def _default(reading: ModelReading, seed: int) -> Needles:
    return needle_texts(reading, length=min(256, getattr(reading.model.cfg, "n_ctx", None) or 256), seed=seed)


def _several(reading: ModelReading, heldout: Any) -> list[Needles]:
    several = [heldout] if isinstance(heldout, Needles) else heldout
    if isinstance(several, (str, Tensor)) or not isinstance(several, Collection) or not several:
        raise ArgumentError("heldout", f"must be Needles, or a list of them, got {shown(heldout)}")
    return [check_needles(reading.model, "heldout", some) for some in several]


def _scores(reading: ModelReading, needles: Needles, specs: Sequence[AttentionSpec], bar: Any) -> pd.DataFrame:
    """One row per head: both scores and their standard errors over pairs."""
    names = [(spec.layer, head) for spec in specs for head in range(spec.n_heads)]
    table = pd.DataFrame(names, columns=["layer", "head"])
    scores = {"copying": _copying(reading.model, needles, specs, bar)}
    scores["attention"] = needle_attention(reading.model, needles, [(spec, [*range(spec.n_heads)]) for spec in specs])
    for name, values in scores.items():
        table[name], table[f"{name}_se"] = values.mean(0).numpy(), _error(values)
    return table


def _copying(model: Any, needles: Needles, specs: Sequence[AttentionSpec], bar: Any) -> Float64[Tensor, "pair head"]:
    """Estimate by how much the metric falls if the result of each head at the last token came from the other text."""
    ends, slopes = list[Tensor](), list[Tensor]()
    for part in parts_of_needles(model, needles, TOKENS):
        tokens = part.texts.groups[0].tokens
        none = torch.empty(0, *tokens.shape, dtype=torch.float64, device="cpu")
        layers = [spec.layer for spec in specs]
        (found,) = result_gradients(model, [tokens], layers, partial(_sum_of, part.metric), [none])
        for to, by_layer in ((ends, found.z), (slopes, found.metric)):
            to.append(torch.cat([_at_end(by_layer[spec.layer], spec) for spec in specs], 1))
        bar.update(len(tokens))
    z, gradient = torch.cat(ends), torch.cat(slopes)
    # The metric of a pair's second text is that of its first with the sign exchanged, and so is its gradient.
    fall: Tensor = ((gradient[::2] - gradient[1::2]) / 2 * (z[::2] - z[1::2])).sum(-1)
    return fall


def _sum_of(metric: Metric, outputs: list[Tensor]) -> Tensor:
    total: Tensor = metric(outputs[0]).sum()
    return total


def _at_end(z: Tensor, spec: AttentionSpec) -> Float64[Tensor, "text head d_head"]:
    return z[:, -1].reshape(len(z), spec.n_heads, -1).double().cpu()


def _error(values: Float64[Tensor, " *_shape"]) -> Any:
    return (values.std(0) / len(values) ** 0.5).numpy() if len(values) > 1 else nan


def _top(heads: pd.DataFrame, n: int) -> list[Head]:
    """Take the first n heads, at most half of each layer's, so that each layer has as many others."""
    room = (heads["layer"].value_counts() // 2).to_dict()
    check_integer("n", n, 0, sum(room.values()))
    chosen: list[Head] = []
    for layer, head in zip(heads["layer"], heads["head"], strict=True):
        if len(chosen) < n and room[layer]:
            chosen.append((int(layer), int(head)))
            room[layer] -= 1
    return chosen


def _others(heads: pd.DataFrame, top: Sequence[Head], generator: np.random.Generator) -> list[Head]:
    """Draw as many other heads of each layer as it has among the first."""
    drawn: list[Head] = []
    for layer in sorted({layer for layer, _ in top}):
        own = {head for x, head in top if x == layer}
        rest = sorted({*heads.loc[heads["layer"] == layer, "head"].tolist()} - own)
        drawn += [(layer, int(head)) for head in generator.choice(rest, len(own), replace=False)]
    return drawn


def _knockout(
    reading: ModelReading,
    heads: pd.DataFrame,
    needles: Needles,
    heldout: Needles,
    sizes: Sequence[int],
    draws: int,
    mode: Mode,
    seed: int,
    bar: Any,
) -> pd.DataFrame:
    """One row per depth, number of heads, and heads that are ablated."""
    generator = np.random.default_rng(seed)
    reference = needles.tokens if mode == "mean" else None

    def run(some: Sequence[Head]) -> Float64[Tensor, " text"]:
        hooks = ablate_heads(reading, list(some), mode=mode, reference=reference) if some else []
        found = needle_differences(reading.model, heldout, hooks)
        bar.update()
        return found

    clean = run([])
    rows = [*_rows(heldout, "none", 0, clean[None])]
    for n in sizes:
        top = _top(heads, n)
        without = run(top)
        others = torch.stack([run(_others(heads, top, generator)) for _ in range(draws)])
        p = _level(_of_pairs(others.mean(0) - without), seed)
        rows += [*_rows(heldout, "top", n, without[None], p), *_rows(heldout, "random", n, others)]
    return pd.DataFrame(rows)


def _of_pairs(values: Float64[Tensor, "*draw text"]) -> Float64[Tensor, "*draw pair"]:
    pairs: Tensor = values.unflatten(-1, (-1, 2)).mean(-1)
    return pairs


def _level(drops: Float64[Tensor, " pair"], seed: int) -> float:
    """Compute the share of random signs under which the mean is as large, the given ones among them."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (_SIGNS, len(drops)), generator=generator, device="cpu").double() * 2 - 1
    as_large = (signs * drops).mean(1) >= drops.mean() - 1e-12
    return (1 + int(as_large.sum())) / (1 + _SIGNS)


def _rows(
    needles: Needles, ablated: str, n: int, values: Float64[Tensor, "draw text"], p: float = nan
) -> Iterator[dict[str, Any]]:
    """Of all texts, and of those with the needle at each depth."""
    for depth in (nan, *sorted({*needles.depths.tolist()})):
        some = values if np.isnan(depth) else values[:, needles.depths == depth]
        units = _of_pairs(some) if np.isnan(depth) else some
        yield {
            "length": needles.tokens.shape[1],
            "depth": depth,
            "n": n,
            "ablated": ablated,
            "difference": units.mean().item(),
            "se": float(_error(units.mean(0))),
            "right": (some > 0).double().mean().item(),
            "sd": units.mean(1).std().item() if len(units) > 1 else nan,
            "p": p if np.isnan(depth) else nan,
        }
