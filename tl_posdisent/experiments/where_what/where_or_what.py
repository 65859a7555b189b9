"""Where or what: which part of its attention a head's contribution to the predictions needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.curvature import curvature
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.run_changes import run_changes
from tl_posdisent.experiments.where_what.replacements import MEAN, ByReplacement, Fold, folds, over_folds
from tl_posdisent.experiments.where_what.sentences import hooks_sentences
from tl_posdisent.experiments.where_what.shares import NEGLIGIBLE, Verdict, shares_of, verdicts
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.hook_list import Heads, any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.partial_forward import BlockFacts, block_facts
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, head_label, is_integer, listed
from tl_posdisent.utils.words import plural

Exact = int | Literal["all"] | Sequence[tuple[int, int] | str]
"""How many heads of the largest contribution are run, or which."""


def where_or_what(
    model: Any,
    tokens: Tokens,
    heldout: Tokens | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 4,
    exact: Exact = 12,
    negligible: float = NEGLIGIBLE,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Decide by intervention whether a head needs *where* keys are or *what* they are, for all heads at once.

    A head contributes what changes in the predictions if its output is replaced by its mean: the divergence
    ``K_mean = KL(unmodified ‖ replaced)``. Two other replacements keep a part of its attention:

    * *distances alone*: the best attention that depends on the distance and the first token only (``fitted_attention``,
      ``"distance+sink"``); the share of the contribution that survives is ``where = 1 - K_distance / K_mean``;
    * *content alone*: every key but the query's own at one distance, the best of 1, 5 and 32 (``remap_distance``);
      ``what = 1 - K_content / K_mean``.

    ============== ============= ============ ===============================================================
    verdict        ``where``     ``what``     meaning
    ============== ============= ============ ===============================================================
    *where*        above ½       below ½      distances alone suffice
    *what*         below ½       above ½      content alone suffices
    *both*         below ½       below ½      position and content are needed together
    *either*       above ½       above ½      either suffices, and uniform attention does not
    *neither*      above ½       above ½      uniform attention suffices: the pattern does not matter
    *not used*     –             –            the contribution is surely below ``negligible``
    *undecided*    –             –            one of these shares is not surely above or below ½
    ============== ============= ============ ===============================================================

    A share is surely above or below ½ with a confidence of 95 %, by a one-sided t-test over texts. Attention that is
    nearly uniform, as that of most random weights, is at *neither*. Random weights with large scores may be at *what*
    or *both* as well: compare with copies (``random_control``). A share is negative where the replacement does more
    harm than the head contributes: a head that idles at the first token is harmed by a pattern without its query, and
    may be at *both* although it contributes little. Shares belong to a length of texts: the more keys there are, the
    more can be wrong, and *what* falls most. With fewer than about 32 tokens any attention seems to suffice. In texts
    that repeat at one distance, distance and content say the same.

    Mean outputs and distance profiles are fitted to other texts than those that are measured: fitted to the same text,
    a profile would contain the pattern of that text. Divergences are estimated for all heads by curvature, as in
    ``head_effects``, but of the change at each position alone; for the heads of largest contribution, and others on
    request, they are measured by runs. In SmolLM2, estimates of the contribution are .78 of measured ones, and shares
    have a median error of .05 and .02. Where a later layer averages over many positions, estimates are far too small.

    Args:
        model, layers, heads, progress: as in ``head_ablation``; the model must return logits, and its layers must have
            RoPE.
        tokens: texts, as in ``head_ablation``, or with their mask as a tokenizer returns them. Each half is measured
            with what was fitted to the other half. A text that is longer than all others is read up to the length of
            the second longest. Equal texts are warned of.
        heldout: other texts to measure, no longer than those of ``tokens``, which are then all used to fit.
        draws: as in ``head_effects``, at least 1.
        exact: how many heads of the largest contribution are run, or ``"all"``, or which: labels or pairs.
        negligible: the contribution in nats per predicted token below which a head is not used.
        seed: as in ``head_effects``.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``where``, ``what``, and ``uniform``, the share under uniform
        attention, from 0 to 1; the same ``…_unclipped``, which may be negative; ``contribution``, K_mean in nats per
        predicted token; standard errors over texts ``where_se``, ``what_se``, ``uniform_se`` (of the unclipped
        values) and ``contribution_se``; ``content_distance``, the distance of the other keys at which most survives;
        ``exact``, whether the head was run; ``verdict``. (``table["where"]``: ``table.where`` is a method of pandas.)

        The constant behind ``what`` is chosen for each text in the other texts, so that the best of several does not
        look better than it is. ``attrs["statement"]`` counts the verdicts in a sentence, with the part of the summed
        contributions that these heads have. ``attrs["passes"]`` is the
        cost in forward passes of all measured texts; a backward pass counts as two.

    Raises:
        ValueError: fewer than two texts; ``heldout`` that is longer than all ``tokens``; layers without RoPE, or whose
            scores cannot be changed; what ``head_effects`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, where_or_what
        >>> model, tokens = load_demo_model(), demo_tokens(length=512).view(8, 64)
        >>> table = where_or_what(model, tokens, exact=4, progress=False)
        >>> table.attrs["statement"].split(":")[0]
        'What the predictions need'
        >>> columns = ["layer", "head", "where", "what", "verdict"]
        >>> table.nlargest(3, "contribution")[columns].round(1).shape
        (3, 5)
    """
    check_integer("draws", draws, 1)
    negligible = check_number("negligible", negligible, above=0)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads, "where_or_what")
    pairs = pairs_of(chosen)
    n_largest, asked = _heads_to_run(reading, pairs, exact)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    with running(model) as p, p.counting_tokens() as counts:
        texts, of_folds = folds(reading, tokens, heldout, chosen)
        facts = block_facts(p)
        divergences, n_predictions = _estimated(
            reading, of_folds, pairs, draws=draws, seed=seed, facts=facts, progress=progress
        )
        by_size = (n_predictions @ divergences[MEAN]).argsort(descending=True, stable=True)
        to_run = sorted({*by_size[:n_largest].tolist(), *(pairs.index(pair) for pair in asked)})
        measured = _run(reading, of_folds, [pairs[n] for n in to_run], facts=facts, progress=progress)
    for name, values in measured.items():
        divergences[name][:, to_run] = values
    table = pd.DataFrame(pairs, columns=["layer", "head"]).join(shares_of(divergences, n_predictions))
    table["exact"] = [n in to_run for n in range(len(pairs))]
    table["verdict"] = verdicts(table, n_predictions, negligible)
    table = reading.note(table)
    table.attrs["statement"] = " ".join([statement(table), *hooks_sentences(table)])
    table.attrs["passes"] = sum(counts) / sum(texts.lengths) / len(model.blocks) + 2 * draws
    return table


def statement(table: pd.DataFrame) -> str:
    """Count the verdicts of a table of ``where_or_what`` in a sentence, with their parts of all contributions."""
    found = table.groupby("verdict")["contribution"].agg(["size", "sum"])
    total = table["contribution"].sum() or 1.0
    number = {verdict: int(found["size"].get(verdict, 0)) for verdict in get_args(Verdict)}
    part = {name: f"{100 * found['sum'].get(name, 0) / total:.0f} %" for name in number}
    count = {name: f"{n} ({part[name]})" if n else "0" for name, n in number.items()}
    return (
        f"What the predictions need: where keys are in {number['where']} of {plural(len(table), 'head')} "
        f"({part['where']} of the sum of their contributions), what they are in {count['what']}, both together in "
        f"{count['both']}, either of them in {count['either']}; in {count['neither']} the pattern does not matter, "
        f"{number['not used']} contribute nothing measurable, and {count['undecided']} are undecided."
    )


def _heads_to_run(reading: ModelReading, pairs: Sequence[Head], exact: Exact) -> tuple[int, Sequence[Head]]:
    """Return how many heads of the largest contribution are to be run, and which other ones."""
    if isinstance(exact, str) and exact == "all":
        return len(pairs), []
    if is_integer(exact):
        return check_integer("exact", exact, 0), []
    with naming(heads="exact"):
        asked = pairs_of(any_heads(reading, None, exact))
    if missing := [head_label(*pair) for pair in asked if pair not in pairs]:
        raise ArgumentError("exact", f"must lie within the chosen heads, got {missing[0]}")
    return 0, asked


def _estimated(
    reading: ModelReading,
    of_folds: Sequence[Fold],
    pairs: Sequence[Head],
    *,
    draws: int,
    seed: int,
    facts: BlockFacts,
    progress: bool,
) -> tuple[ByReplacement, Float64[Tensor, " text"]]:
    """Estimate the divergence of each text under each replacement of each head, and count its predictions."""
    n_texts, names = sum(len(fold.rows) for fold in of_folds), list(of_folds[0].replacements)
    estimates = []
    with tqdm(total=n_texts * (1 + draws + len(names)), desc="passes", disable=not progress) as bar:
        for fold in of_folds:
            heads = dict.fromkeys(names, pairs)
            options: Any = {"seed": seed, "by_position": True, "facts": facts, "bar": bar}
            estimates.append(curvature(reading, fold.texts, fold.replacements, heads, draws, **options))
    counted = over_folds(of_folds, [{"": x.predictions[None]} for x in estimates])[""][:, 0]
    return over_folds(of_folds, [x.curvature for x in estimates]), counted


def _run(
    reading: ModelReading, of_folds: Sequence[Fold], pairs: Sequence[Head], *, facts: BlockFacts, progress: bool
) -> ByReplacement:
    """Measure the divergence of each text by one run of each replacement of each of these heads alone."""
    total = len(pairs) * sum(len(fold.rows) * len(fold.replacements) for fold in of_folds)
    with tqdm(total=total, desc="runs", disable=not progress or not pairs) as bar:
        of_texts = [
            run_changes(reading, fold.texts, fold.replacements, pairs, facts=facts, bar=bar).checked().by_change
            for fold in of_folds
        ]
    return over_folds(of_folds, of_texts)
