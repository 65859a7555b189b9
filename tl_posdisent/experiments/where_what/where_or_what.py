"""Where or what: which part of its attention a head's contribution to the predictions depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from tl_posdisent.experiments.where_what.head_table import (
    HeadTable,
    estimates_sentences,
    groups_statement,
    parts_sentence,
    verdict_counts,
)
from tl_posdisent.experiments.where_what.measurement import (
    Exact,
    ModelToMeasure,
    cost_bar,
    heads_to_run,
    measure,
    run_heads,
)
from tl_posdisent.experiments.where_what.replacements import folds
from tl_posdisent.experiments.where_what.rows import from_estimates, from_runs, table_of
from tl_posdisent.experiments.where_what.sentences import hooks_sentences
from tl_posdisent.experiments.where_what.verdicts import NEGLIGIBLE
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.applied import check_free
from tl_posdisent.hooks.hook_list import Heads, any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.partial_forward import block_facts
from tl_posdisent.models.running.texts import TokenIds, Tokens
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, head_label, listed, shown

Groups = Mapping[str, Iterable[tuple[int, int] | str]]
"""Heads that are replaced together, by the name of the group."""


def where_or_what(
    model: Any,
    tokens: Tokens,
    heldout: Tokens | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
    groups: Groups | None = None,
    draws: int = 4,
    exact: Exact = "half",
    negligible: float = NEGLIGIBLE,
    ignore: TokenIds | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Divide what each head contributes into the parts that depend on *where* keys are, on *what* they are, on neither.

    A head contributes what changes in the predictions if its output is replaced by its mean: the divergence
    ``K_mean = KL(unmodified ‖ replaced)``. Other replacements keep a part of its attention, and ``1 - K / K_mean`` is
    the share of the contribution that they keep:

    * *distances alone*, p: attention that depends on the distance and the first token only, the nearest to the head's
      own in divergence (``substitute_attention``, ``"distance+sink"``, fitted to other texts);
    * *content alone*, c: every key but the query's own at one distance, the best of 1, 5 and 32 (``remap_distance``);
    * *neither*, u: uniform attention.

    This is a two-by-two experiment, and its Shapley values divide the contribution without remainder:
    ``where = ½ [(p - u) + (1 - c)]``, ``what = ½ [(c - u) + (1 - p)]``, ``neither = u``. Shares are clipped to [0, 1]
    before, and p and c are at least u.

    ============== ====================================================================================
    verdict        which is said with a confidence of 95 %, by t over texts
    ============== ====================================================================================
    *not used*     the contribution is below ``negligible``
    *neither*      uniform attention keeps more than half: the pattern does not matter
    *mixed*        the parts *where* and *what* differ by less than .2
    *where*        *where* is the larger part, and uniform attention keeps at most half (not tested)
    *what*         *what* is the larger part, and uniform attention keeps at most half (not tested)
    *undecided*    none of these; ``open`` says why
    ============== ====================================================================================

    The first that applies is given. Random weights are at *neither* where attention is nearly uniform, but those with
    large scores are not: compare with copies (``random_control``). Parts belong to a length of texts: the more keys
    there are, the more can be wrong, so that *neither* falls. With fewer than about 32 tokens any attention seems to
    suffice. In texts that repeat at one distance, distance and content say the same. Content is that of the head's
    input: an induction head is *what* because an earlier head, which is *where*, wrote the previous token there.

    Mean outputs and distance profiles are fitted to other texts than those that are measured. The first token of a text
    has one key, so no attention can change what a head adds there: it is left as it is, and its prediction is not
    counted. Divergences are estimated for all heads by curvature, as in ``head_effects``, but of the change at each
    position alone; the heads that contribute most are run. What runs show corrects the others, those near in depth
    more: contributions by their mean ratio, and errors by how far estimates were off. Where a later layer averages over
    many positions, or predictions are confident, estimates are far too small, and the table says so.

    Args:
        model, layers, heads, progress: as in ``head_ablation``; the model must return logits, and its layers must have
            RoPE.
        tokens: texts, as in ``head_ablation``, or with their mask as a tokenizer returns them. Each half is measured
            with what was fitted to the other half. A text that is longer than all others is read up to the length of
            the second longest. Equal texts are warned of.
        heldout: other texts to measure, no longer than those of ``tokens``, which are then all used to fit.
        groups: heads that are replaced together, by a name, such as ``{"induction": ["L17H3", "L18H6"]}``: one row for
            each group instead of each head, by runs. What single heads need does not say what they need together.
        draws: as in ``head_effects``, at least 1.
        exact: how many heads of the largest contribution are run (``head_effects`` takes a quarter of this number);
            ``"half"``, as many as carry half of the sum, and the largest in each sixth of the layers, at most 24;
            ``"all"``; or which: labels or pairs.
        negligible: the contribution in nats per predicted token below which a head is not used.
        ignore: token ids, such as those of a chat template, whose predictions are not counted.
        seed: as in ``head_effects``.

    Returns:
        One row per layer and head: ``layer``, ``head`` (of groups: ``group``, ``heads``), and, each with its standard
        error over texts ``…_se`` by jackknife (the parts and the verdict are the last columns):

        * ``contribution``: K_mean in nats per predicted token;
        * ``where_part``, ``what_part``, ``neither_part``: from 0 to 1, with the sum 1;
        * ``joint``: ``1 - p - c + u``, above 0 where position and content are needed together, below 0 where either
          serves; ``difference``: ``where_part - what_part``;
        * ``kept_distance``, ``kept_content``, ``kept_uniform``: p, c and u before clipping; negative where a
          replacement does more harm than the head contributes;
        * ``gate``: the same with the head's own attention to the first token, and uniform attention to the rest: what
          only needs to know how much to attend;

        then ``content_distance``, the distance of the other keys at which most is kept; ``q``, the false discovery rate
        of ``difference`` over the rows (Benjamini–Hochberg); ``measured``, ``"run"`` or ``"estimated"``; ``verdict``;
        ``open``: of an undecided head ``"a run"`` or ``"more texts"`` where the error of the estimate, or that over
        texts, is what is open, or else the verdicts that it lies between. Errors of estimated rows include that of the
        estimate, as far as runs show it: not with ``exact=0``.

        The table shows its sentence before its rows: ``attrs["statement"]``, the parts of the sum of all contributions,
        each head alone (``attrs["parts"]`` as numbers), and the counts of verdicts, which ``attrs["answer"]`` does not
        have. ``attrs["df"]`` is the number of degrees of freedom of the errors, ``attrs["passes"]`` the cost in
        forward passes of all measured texts; a backward pass counts as two.

    Raises:
        ValueError: fewer than two texts; ``heldout`` that is longer than all ``tokens``; layers without RoPE, or whose
            scores cannot be changed; groups beside layers or heads; what ``head_effects`` refuses.

    Example:
        >>> from tl_posdisent import cut_text, demo_text, load_demo_model, where_or_what
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=64, texts=4)
        >>> table = where_or_what(model, tokens, exact=1, progress=False)
        >>> print(table.attrs["statement"])
        Of what 40 heads contribute in 4 texts of 64 tokens, each alone, ... % depends on where keys are, ...
        >>> table.nlargest(3, "contribution")[["layer", "head", "where_part", "what_part", "verdict"]].shape
        (3, 5)
    """
    check_integer("draws", draws, 1)
    negligible = check_number("negligible", negligible, above=0)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model)
    if groups is not None:
        if layers is not None or heads is not None:
            raise ArgumentError("groups", "must be given without layers and heads: a group names its heads")
        return _of_groups(reading, tokens, heldout, groups, negligible, ignore, progress=progress)
    chosen = any_heads(reading, layers, heads, "where_or_what")
    pairs = pairs_of(chosen)
    to_run = heads_to_run(reading, pairs, exact)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    check_free(reading.model, pairs)
    with running(reading.model) as p, p.counting_tokens() as counts:
        texts, of_folds = folds(reading, tokens, heldout, chosen, ignore)
        subject = ModelToMeasure(reading, of_folds, block_facts(p))
        (runs,), places, n = measure([subject], pairs, to_run, draws=draws, seed=seed, progress=progress)
    found = from_estimates(pairs, reading.n_layers, runs.estimated, runs.measured, places, n)
    rows = table_of(pd.DataFrame(pairs, columns=["layer", "head"]), found, negligible)
    table = HeadTable(rows)
    table.attrs |= reading.note(rows).attrs
    parts, counts_of_verdicts = parts_sentence(table, found, texts.lengths), verdict_counts(table)
    more = [*estimates_sentences(pairs, found.ratios.tolist()), *hooks_sentences(table)]
    table.attrs["statement"] = " ".join([parts, counts_of_verdicts, *more])
    table.attrs["answer"] = " ".join([parts, *more])
    table.attrs["parts"] = found.parts_of_sum()
    table.attrs["passes"] = sum(counts) / sum(texts.lengths) / reading.n_layers + 2 * draws
    return table


def _of_groups(
    reading: ModelReading,
    tokens: Tokens,
    heldout: Tokens | None,
    groups: Groups,
    negligible: float,
    ignore: TokenIds | None,
    *,
    progress: bool,
) -> pd.DataFrame:
    """Run groups of heads, each replaced together."""
    by_name = _read_groups(reading, groups)
    chosen = any_heads(reading, None, sorted({pair for pairs in by_name.values() for pair in pairs}), "where_or_what")
    check_reach(reading, [spec.layer for spec, _ in chosen])
    check_free(reading.model, pairs_of(chosen))
    with running(reading.model) as p, p.counting_tokens() as counts:
        texts, of_folds = folds(reading, tokens, heldout, chosen, ignore)
        n_texts, n_replacements = len(texts.tokens), len(of_folds[0].replacements)
        with cost_bar(n_texts, None, n_replacements, len(by_name), progress=progress) as bar:
            items, subject = [*by_name.values()], ModelToMeasure(reading, of_folds, block_facts(p))
            measured, n_predictions = run_heads(subject, items, bar=bar)
    named = {"group": [*by_name], "heads": [", ".join(head_label(*pair) for pair in pairs) for pairs in items]}
    rows = table_of(pd.DataFrame(named), from_runs(measured, n_predictions), negligible)
    table = HeadTable(rows)
    table.attrs |= reading.note(rows).attrs
    table.attrs["statement"] = " ".join([groups_statement(table, texts.lengths), *hooks_sentences(table)])
    table.attrs["passes"] = sum(counts) / sum(texts.lengths) / reading.n_layers
    return table


def _read_groups(reading: ModelReading, groups: Any) -> dict[str, list[tuple[int, int]]]:
    """Return the heads of each group as pairs, or raise."""
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(name, str) for name in groups):
        needed = 'must be heads by the name of a group, such as {"induction": ["L5H1", "L6H9"]}'
        raise ArgumentError("groups", f"{needed}, got {shown(groups)}")
    with naming(heads="groups"):
        return {name: pairs_of(any_heads(reading, None, listed("groups", heads))) for name, heads in groups.items()}
