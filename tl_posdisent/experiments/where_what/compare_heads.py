"""What changed in the heads of a model: two of one architecture, on the same texts."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tl_posdisent.experiments.where_what.change_table import ChangeTable, change_statement
from tl_posdisent.experiments.where_what.changes import compared, table_of_changes
from tl_posdisent.experiments.where_what.head_table import estimates_sentences
from tl_posdisent.experiments.where_what.measurement import Exact, ModelToMeasure, heads_to_run, measure
from tl_posdisent.experiments.where_what.replacements import folds
from tl_posdisent.experiments.where_what.sentences import hooks_sentences
from tl_posdisent.experiments.where_what.two_models import read_both, same_heads, same_models
from tl_posdisent.experiments.where_what.verdicts import NEGLIGIBLE
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.applied import check_free
from tl_posdisent.hooks.hook_list import Heads, any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import user_hooks
from tl_posdisent.models.running.partial_forward import block_facts
from tl_posdisent.models.running.texts import TokenIds, Tokens
from tl_posdisent.utils.tables import with_ends
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, listed


def compare_heads(
    before: Any,
    after: Any,
    tokens: Tokens,
    heldout: Tokens | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 4,
    exact: Exact = "half",
    negligible: float = NEGLIGIBLE,
    ignore: TokenIds | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Say which heads changed between two models of one architecture, such as checkpoints before and after fine-tuning.

    Both are measured as by ``where_or_what``, on the same texts, with the same draws, and with runs of the same heads:
    those that it would run in either. Mean outputs and distance profiles are fitted in each model. A change is the
    difference after - before, paired by text: it has a smaller error than two tables have.

    A head that changed need not be one that *was* changed: others make up for it, and later layers receive something
    else. ``same_weights`` says which heads have the weights that they had.

    Args:
        before, after: two models as in ``where_or_what``, of one architecture and vocabulary; ``before`` reads texts.
        tokens, heldout, layers, heads, draws, exact, ignore, seed, progress: as in ``where_or_what``.
        negligible: the contribution in nats per predicted token below which a head is not used, and its change below
            which it is not named.

    Returns:
        One row per layer and head: ``layer``, ``head``; then for each of ``contribution``, ``where_part``,
        ``what_part``, ``neither_part`` and ``difference`` (of ``where_or_what``):

        * ``…_before``, ``…_after`` and ``…_change``, each with its standard error over texts ``…_se`` by jackknife;
        * ``…_q`` (not of ``difference``): the false discovery rate of the change (Benjamini–Hochberg, t over texts), of
          contributions among all heads, of parts among the three of all heads. NaN where a head is not used: of parts
          in one of the models, of the contribution in both;

        then ``measured``, ``"run"`` or ``"estimated"`` in both; ``same_weights``: whether the head's weights and those
        of its layer's input norm are equal; ``verdict_before``, ``verdict_after``; ``changed``: what surely changed (q
        at most .05), such as ``"contributes less, more where"``, and by more than ``negligible`` or a hundredth of a
        part.

        Errors of estimated changes include how far such estimates were from runs, as far as runs show it: not with
        ``exact=0``.

        The table shows its sentence before its rows: ``attrs["statement"]``, how many heads changed, in which way, and
        which. ``attrs["passes"]`` is the cost of both models in forward passes of all measured texts.

    Raises:
        ValueError: models that differ in architecture, vocabulary or device; the same model twice; what
            ``where_or_what`` refuses.

    Example:
        >>> import copy
        >>> from tl_posdisent import compare_heads, cut_text, demo_text, load_demo_model
        >>> before = load_demo_model(backend="bridge")
        >>> after = copy.deepcopy(before)
        >>> _ = after.blocks[3].attn.W_O.data[0].mul_(0.3)  # L3H0 writes less
        >>> tokens = cut_text(before, demo_text(), length=48, texts=6)
        >>> table = compare_heads(before, after, tokens, heads=["L3H0", "L3H1"], exact="all", progress=False)
        >>> table.nsmallest(1, "contribution_change")[["layer", "head", "changed", "same_weights"]].values.tolist()
        [[3, 0, 'contributes less', False]]
    """
    check_integer("draws", draws, 1)
    negligible = check_number("negligible", negligible, above=0)
    check_seed(seed)
    readings = read_both(before, after)
    chosen = any_heads(readings[0], listed("layers", layers), heads, "compare_heads")
    pairs = pairs_of(chosen)
    to_run = heads_to_run(readings[0], pairs, exact)
    for reading in readings:
        check_reach(reading, [spec.layer for spec, _ in chosen])
        check_free(reading.model, pairs)
    with (
        running(readings[0].model) as p,
        running(readings[1].model) as other,
        p.counting_tokens() as counts,
        other.counting_tokens() as other_counts,
    ):
        texts, of_before = folds(readings[0], tokens, heldout, chosen, ignore)
        of_after = any_heads(readings[1], None, pairs, "compare_heads")
        both = [
            ModelToMeasure(readings[0], of_before, block_facts(p)),
            ModelToMeasure(
                readings[1], [fold.of_another(readings[1], of_after) for fold in of_before], block_facts(other)
            ),
        ]
        (first, second), places, n = measure(both, pairs, to_run, draws=draws, seed=seed, progress=progress)
    found = compared(pairs, readings[0].n_layers, first, second, places, n)
    rows = table_of_changes(pairs, found, negligible).assign(same_weights=same_heads(*readings, pairs))
    table = ChangeTable(with_ends(rows, (), ["verdict_before", "verdict_after", "changed"]))
    readings[0].note(table)
    if hooked := [name for reading in readings for name in user_hooks(reading.model)]:
        table.attrs["hooks"] = list(dict.fromkeys(hooked))
    said = [change_statement(table, texts.lengths, equal=same_models(*readings))]
    for side in (found.before, found.after):
        said += estimates_sentences(pairs, side.ratios.tolist())
    table.attrs["statement"] = " ".join([*dict.fromkeys(said), *hooks_sentences(table)])
    tokens_run = (sum(counts) + sum(other_counts)) / readings[0].n_layers
    table.attrs["passes"] = tokens_run / sum(texts.lengths) + 4 * draws
    return table
