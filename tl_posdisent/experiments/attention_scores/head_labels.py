"""Labels of heads: previous token, duplicate token, induction, first token, local mass, entropy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.random_copies import beside_random, by_weights
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads, pairs_of
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.loading.random_init import USUAL_STD, Scale, described_copies, initial_scale
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts, special_id
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HEAD, with_ends
from tl_posdisent.utils.validation import check_integer, check_seed, check_seeds, listed

SEQUENCE_TOKENS = 50  # length of the random sequence that is repeated, if the vocabulary and the context allow it
N_SEQUENCES = 4  # number of random sequences to average over
_N_LOCAL_KEYS = 8  # number of last keys that count as local
_LABEL_THRESHOLD = 0.5  # part of the way from the random copies' value to 1 from which on a head has the label
_LABELS = ("previous_token", "duplicate_token", "induction", "first_token")
_MEASURES = (*_LABELS, "local", "entropy")


def head_labels(
    model: Any,
    tokens: Tokens | None = None,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    length: int | None = None,
    seed: int = 0,
    seeds: int | Iterable[int] = 1,
    std: Scale = "config",
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the properties by which heads are usually labelled, each with its random-weights baseline.

    Five measures are means over queries of the attention that a head gives to

    * ``previous_token``: the key just before the query;
    * ``duplicate_token``: the same token in the first copy of a random sequence that is repeated;
    * ``induction``: the token after that one (arXiv 2209.11895);
    * ``first_token``: the first key, often an attention sink (arXiv 2410.10781);
    * ``local``: the last 8 keys, the query's own included, for queries that see more (if a text is shorter than 9
      tokens, the last keys of all texts that leave one token of it out).

    ``entropy`` is the entropy of the attention over keys, in nats. Duplicate tokens and induction are measured on four
    sequences of repeated random tokens, the others on ``tokens``. Whether a head needs keys beyond the first and the
    last ones is a question of its effect: ``head_effects(model, tokens, {"window": lambda_mask(model, 4, 64)})``.

    Args:
        model, attention_mask, layers, heads: as in ``additivity``.
        tokens: as in ``additivity``; default the repeated random tokens for all measures.
        length: tokens of the random sequence, all different; default 50, or as many as vocabulary and context allow.
        seed: seed of the random sequences.
        seeds: number of random copies of the model (``random_control``), or a list of their seeds; 0 or ``()`` for
            none.
        std: standard deviation of the copies' weights (a single one), as in ``random_control``.
        progress: show a progress bar over the models.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``label``; then each measure, and with the suffix ``_random``
        its mean over the random copies. ``label`` names those of the first four measures that are at least half of the
        way from the random copies' value (without copies: from 0) to 1, joined by ``+``; if there are none,
        ``"local"`` if that measure is; else it is empty.

        ``table.attrs["random weights"]`` describes the copies; ``table.attrs["start_token"]`` is the token that begins
        the repeated random tokens (None without tokenizer or configuration).

    Raises:
        ValueError: invalid arguments; a layer without hooks for its pattern and scores.

    Example:
        >>> from tl_posdisent import demo_tokens, head_labels, load_demo_model
        >>> table = head_labels(load_demo_model(), demo_tokens(length=64), progress=False)
        >>> len(table), bool((table["first_token"] > 3 * table["first_token_random"]).any())
        (40, True)
    """
    seeds = check_seeds(seeds, 0)
    layers = listed("layers", layers)
    reading = read_model(model)
    pairs = pairs_of(any_heads(reading, layers, heads))
    copied = repeated_tokens(reading.model, length, N_SEQUENCES, check_seed(seed))
    read = (copied, torch.ones_like(copied)) if tokens is None else (tokens, attention_mask)
    measure = partial(label_measures, texts=read_texts(reading.model, *read), copied=copied, pairs=pairs)
    scale = initial_scale(reading.model, std) if seeds else USUAL_STD
    rows = beside_random(reading, {"labels": measure}, seeds, scale, progress=progress)["labels"]
    table = labelled(*by_weights(rows))
    table.attrs["start_token"] = start_token(reading.model)
    if seeds:
        table.attrs["random weights"] = described_copies(scale, seeds)
    return reading.note(table)


def repeated_tokens(model: Any, length: int | None, repeats: int, seed: int) -> Int[Tensor, "repeats pos"]:
    """Draw sequences of different random tokens, each repeated once, after the start token if the model has one."""
    bos = start_token(model)
    start = [] if bos is None else [bos]
    special = (special_id(model, "pad"), getattr(model.cfg, "pad_id", None), *start)
    usable = torch.tensor([x for x in range(model.cfg.d_vocab) if x not in special])
    room = (getattr(model.cfg, "n_ctx", None) or 2 * SEQUENCE_TOKENS + 1) - len(start)
    most = min(len(usable), room // 2)
    length = min(most, SEQUENCE_TOKENS) if length is None else check_integer("length", length, 2)
    if length > most:
        raise ArgumentError(
            "length",
            f"must be at most {most}, got {length}: the vocabulary has {len(usable)} usable tokens, and the "
            f"context fits {room // 2} tokens twice",
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(usable), generator=generator)[:length] for _ in range(repeats)]
    drawn = usable[torch.stack(orders)]
    first = torch.tensor(start, dtype=torch.int64).expand(repeats, -1)
    return torch.cat([first, drawn, drawn], 1).to(device_of(model))


def start_token(model: Any) -> int | None:
    """Return the token that begins texts; None if there is none, or none that the model can read.

    TransformerLens adds a token beyond the vocabulary to tokenizers that lack a special token.
    """
    bos = special_id(model, "bos")
    return bos if bos is not None and bos < model.cfg.d_vocab else None


def label_measures(
    reading: ModelReading, texts: Texts, copied: Int[Tensor, "repeats pos"], pairs: list[tuple[int, int]]
) -> pd.DataFrame:
    """Compute the measures of the heads of one model, a row for each.

    Args:
        texts: where duplicate tokens and induction are not measured.
        copied: where these are: ``repeated_tokens``.
    """
    chosen = any_heads(reading, None, pairs)
    sums: dict[tuple[str, int], Any] = defaultdict(float)
    local = min(_N_LOCAL_KEYS, min(texts.lengths) - 1)
    for group in texts.groups:
        _add_means(sums, reading, group.tokens, chosen, partial(_text_measures, local=local), len(texts.tokens))
    _add_means(sums, reading, copied, chosen, partial(_copy_measures, n=copied.shape[1] // 2), len(copied))
    columns = {name: torch.cat([sums[name, spec.layer] for spec, _ in chosen]).tolist() for name in _MEASURES}
    return pd.DataFrame(pairs_of(chosen), columns=HEAD).assign(**columns)


def labelled(trained: pd.DataFrame, random: pd.DataFrame | None) -> pd.DataFrame:
    """Label heads by their measures, and put the mean over random copies beside each.

    Args:
        trained, random: tables of ``label_measures``, of the model and of all random copies, if any.
    """
    own = trained.set_index(HEAD)[[*_MEASURES]]
    chance = None if random is None else random.groupby(HEAD)[[*_MEASURES]].mean().loc[own.index]
    above = (own if chance is None else (own - chance) / (1 - chance)) >= _LABEL_THRESHOLD
    names = [[name for name in _LABELS if row[name]] for _, row in above.iterrows()]
    labels = ["+".join(label or ["local"] * local) for label, local in zip(names, above["local"], strict=True)]
    columns = {"label": pd.Series(labels, index=own.index, dtype="object")}
    for name in _MEASURES:
        columns |= {name: own[name]} | ({} if chance is None else {f"{name}_random": chance[name]})
    return with_ends(pd.DataFrame(columns).reset_index(), (), ["previous_token", "induction"])


def _add_means(
    sums: dict[tuple[str, int], Any],
    reading: ModelReading,
    tokens: Int[Tensor, "batch pos"],
    chosen: Chosen,
    measure: Callable[[Pattern], dict[str, Tensor]],
    n_texts: int,
) -> None:
    """Add each measure of these texts, over the number of all texts, to its sum by name and layer."""
    heads = {spec.layer: numbers for spec, numbers in chosen}

    def add(spec: AttentionSpec, pattern: Pattern) -> None:
        by_head = [measure(one.double()) for one in of_heads(pattern, heads[spec.layer]).split(1, 1)]  # less memory
        for name in by_head[0]:
            sums[name, spec.layer] += torch.cat([x[name] for x in by_head], 1).sum(0).cpu() * (1 / n_texts)

    for_each_pattern(reading.model, tokens, [spec for spec, _ in chosen], add)


def _text_measures(pattern: Pattern, local: int) -> dict[str, Float64[Tensor, "batch head"]]:
    """Compute mean attention to the previous token, first token and near keys, and entropy, without the first query."""
    distance = torch.arange(pattern.shape[-1], device=pattern.device)
    near = (distance[:, None] - distance).abs() < local
    rows = pattern[..., 1:, :]
    shares = rows / rows.sum(-1, keepdim=True)  # of the attention to tokens; a learned sink may take a part
    return {
        "previous_token": pattern.diagonal(-1, -2, -1).mean(-1),
        "first_token": rows[..., 0].mean(-1),
        "local": (pattern * near).sum(-1)[..., local:].mean(-1),
        "entropy": torch.special.entr(shares).sum(-1).mean(-1),
    }


def _copy_measures(pattern: Pattern, n: int) -> dict[str, Float64[Tensor, "batch head"]]:
    """Compute mean attention of the second copy's tokens to the same tokens in the first, and to those after them."""
    return {
        "duplicate_token": pattern.diagonal(-n, -2, -1)[..., -n:].mean(-1),
        "induction": pattern.diagonal(1 - n, -2, -1)[..., -n:].mean(-1),
    }
