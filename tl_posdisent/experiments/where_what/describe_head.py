"""One head in words: whether it is looking at where or at what, what it looks like, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from tl_posdisent.experiments.where_what.head_description import HeadDescription
from tl_posdisent.experiments.where_what.head_example import check_place, measure_example
from tl_posdisent.experiments.where_what.head_looks import measure_looks
from tl_posdisent.experiments.where_what.head_runs import measure_head
from tl_posdisent.experiments.where_what.replacements import folds
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.applied import check_free
from tl_posdisent.hooks.hook_list import OneHead, one_head
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import TokenIds, Tokens
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_seed, check_seeds, shown


def describe_head(
    model: Any,
    tokens: Tokens,
    head: OneHead,
    heldout: Tokens | None = None,
    *,
    query: tuple[int, int] | None = None,
    key: int | None = None,
    seeds: int | Iterable[int] = 1,
    ignore: TokenIds | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeadDescription:
    """Say whether one head is looking at *where* or at *what*: the answer, and in words what it rests on.

    * *Needs*: the parts of its contribution that depend on where keys are, on what they are and on neither, and the
      shares that are kept with distances alone, content alone, and uniform attention, as in ``where_or_what``, here by
      runs. Also the raw costs of every other key at one distance. Where these exceed the contribution, wrong attention
      does harm.
    * *Looks*: the variance of its scores by component, beside random weights (``additivity``, ``random_control``), its
      usual label (``head_labels``), and its attention by distance. A variance weighs all pairs of tokens, a
      contribution those that matter to predictions; where the two disagree, a sentence says so.
    * *Why*: for one query, the attended key is compared with the key of the largest content part, by the two-axis
      parts of their scores: ``g(q, k)``, averaged over distances, and ``f(q, d)``, of the mean key. Then the largest
      sources of the difference (``score_sources``), and what the head adds directly to the logits.

    The cost in forward passes of the texts is 10 for *needs*, and for the others a few and a fixed number of tokens
    (``passes`` is the sum).

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; the layer must have RoPE,
            and the model must return logits.
        tokens, heldout: texts, as in ``where_or_what``: at least two.
        head: a label such as ``"L8H1"``, or a pair (layer, head).
        query: text and position of the query to explain, in the measured texts without padding; default that of the
            largest contribution.
        key: position of the key to explain there; default that of the largest attention.
        ignore: as in ``where_or_what``.
        seeds: number of random copies of the model for *looks*, or a list of their seeds; 0 for none.
        seed: seed of the random tokens on which labels are measured.
        progress: show a progress bar.

    Returns:
        A ``HeadDescription``: its ``repr`` begins with the answer, ``to_frame()`` has all numbers.

    Raises:
        ValueError: not one head; fewer than two texts; a query that is not in the texts or sees a single key; a key
            that it does not see; what ``where_or_what`` refuses.

    Example:
        >>> from tl_posdisent import cut_text, demo_text, describe_head, load_demo_model
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=64, texts=4)
        >>> found = describe_head(model, tokens, "L3H4", progress=False)
        >>> print(found.answer)
        L3H4 contributes ... nats per predicted token: ... % where, ... % what, ... % neither: ...
        >>> found.to_frame().columns.tolist()
        ['part', 'quantity', 'value', 'se']
    """
    numbers, seed = check_seeds(seeds, 0), check_seed(seed)
    if key is not None and query is None:
        raise ArgumentError("key", f"must be None without query=(text, position), got {shown(key)}")
    reading = read_model(model)
    model, (spec, number) = reading.model, one_head(reading, head, "describe_head")
    check_reach(reading, [spec.layer])
    check_free(model, [(spec.layer, number)])
    with running(model) as p, p.counting_tokens() as counts:
        texts, of_folds = folds(reading, tokens, heldout, [(spec, [number])], ignore)
        # A place is refused before the runs, which take most of the time.
        asked = None if query is None else check_place(spec, texts, query, key)
        total = len(texts.tokens) * len(of_folds[0].replacements)
        with tqdm(total=total, desc="runs", disable=not progress) as bar:
            runs = measure_head(reading, of_folds, (spec.layer, number), bar)
        place = asked or check_place(spec, texts, runs.largest(), None)
        example = measure_example(reading, spec, number, texts, place)
        example = replace(example, contribution=runs.contribution_at(example.text, example.query))
        looks = measure_looks(reading, texts, [(spec, [number])], numbers, seed)
    passes = sum(counts) / sum(texts.lengths) / len(model.blocks)
    needs = reading.note(runs.needs())
    return HeadDescription(spec.layer, number, needs, runs.costs(), looks, example, passes)
