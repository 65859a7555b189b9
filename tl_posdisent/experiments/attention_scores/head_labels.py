"""Labels of heads: previous token, duplicate token, induction, first token, local mass, entropy, streaming,
retrieval."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.causal.head_ablation import streaming_ablation, visible_window
from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.experiments.retrieval.needles import Needles, check_needles, needle_attention
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads, hooks_for, pairs_of
from tl_posdisent.hooks.lambda_mask import hiding
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.loading.random_init import Scale, described_copies, initial_scale, random_control
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts, special_id
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import check_flag, check_integer, check_number, check_seed, check_seeds, listed

_LENGTH = 50  # length of the random sequence that is repeated, if the vocabulary and the context allow it
_HEAD = ["layer", "head"]
_LABELS = ("previous_token", "duplicate_token", "induction", "first_token")
_LAYER_MEASURES = (*_LABELS, "local", "entropy")


def head_labels(
    model: Any,
    tokens: Tokens | None = None,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    local: int = 8,
    sinks: int = 4,
    window: int | None = None,
    streaming: bool = True,
    exact: int = 4,
    needles: Needles | None = None,
    length: int | None = None,
    repeats: int = 4,
    threshold: float = 0.5,
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
    * ``local``: the last ``local`` keys, the query's own included, for queries that see more.

    ``entropy`` is the entropy of the attention over keys, in nats. ``streaming`` is the added loss, in nats per token,
    if this head alone sees only sinks and a window (``streaming_ablation``; arXiv 2410.10819). It is estimated for all
    heads at once, and the ``4 * exact`` heads of largest estimates are run (``head_effects``). With
    ``needles``, ``retrieval`` is the attention from a question to its answer in a long text, minus that to another word
    (``attention`` of ``retrieval_heads``; arXiv 2404.15574). Duplicate tokens and induction are measured on repeated
    random tokens, the others on ``tokens``.

    Args:
        model, attention_mask, layers, heads: as in ``additivity``.
        tokens: as in ``additivity``; default the repeated random tokens for all measures.
        local: number of last keys that count as local.
        sinks, window: as in ``streaming_ablation``.
        streaming: False omits this measure, which takes most of the time.
        exact: a quarter of the number of heads that are run for ``streaming``, in each model (``head_effects``). They
            are chosen among the heads of the table, so one may be run that is estimated in a table of more heads.
        needles: texts for ``retrieval`` (``needle_texts``); default without this measure.
        length: tokens of the random sequence, all different; default 50, or as many as vocabulary and context allow.
        repeats: number of random sequences to average over.
        threshold: threshold for ``label``, see below.
        seed: seed of the random sequences, and of the estimates of ``streaming``.
        seeds: number of random copies of the model (``random_control``), or a list of their seeds; 0 or ``()`` for
            none.
        std: standard deviation of the copies' weights (a single one), as in ``random_control``.
        progress: show a progress bar over the models.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``label``; then each measure, and with the suffix ``_random``
        its mean over the random copies. ``streaming_exact`` says whether ``streaming`` was run (with ``_random``: in
        which share of the copies). ``label`` names those of the first four measures that reach at least the
        fraction ``threshold`` of the way from the random copies' value (without copies: from 0) to 1, joined by ``+``;
        if there are none, ``"local"`` if that measure reaches it; else it is empty.

        ``table.attrs["search"]`` gives, unless all heads were run for ``streaming``, how many were run and the bound
        for the others; ``table.attrs["random weights"]`` describes the copies; ``table.attrs["start_token"]`` is the
        token that begins the repeated random tokens (None without tokenizer or configuration).

    Raises:
        ValueError: invalid arguments; sinks and a window that hide nothing; a layer without hooks for its pattern and
            scores.

    Example:
        >>> from tl_posdisent import demo_tokens, head_labels, load_demo_model
        >>> table = head_labels(load_demo_model(), demo_tokens(length=64), streaming=False, progress=False)
        >>> len(table), bool((table["first_token"] > 3 * table["first_token_random"]).any())
        (40, True)
    """
    check_integer("local", local, 1)
    check_integer("sinks", sinks, 0)
    check_integer("repeats", repeats, 1)
    check_number("threshold", threshold, above=0)
    check_flag("streaming", streaming)
    check_integer("exact", exact, 0)
    seeds = check_seeds(seeds, 0)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    pairs = pairs_of(any_heads(reading, layers, heads))
    if needles is not None:
        needles = check_needles(reading.model, "needles", needles)
    copied = repeated_tokens(reading.model, length, repeats, check_seed(seed))
    given = (copied, torch.ones_like(copied)) if tokens is None else (tokens, attention_mask)
    texts = read_texts(reading.model, *given)
    if min(texts.lengths) <= local:
        raise ArgumentError("local", f"must be less than the shortest text's {min(texts.lengths)} tokens, got {local}")
    scales = [initial_scale(reading.model, std)] if seeds else []
    copies = random_control(reading.model, seeds, std=scales) if seeds else ()
    if streaming:
        window = visible_window(texts, sinks, window)
    found, searches = list[pd.DataFrame](), list[dict[str, Any]]()
    models = (m for group in ([reading], copies) for m in group)
    with progress_bar(models, total=1 + len(seeds), desc="models", disable=not progress) as bar:
        for m in bar:
            one = read_model(m, sorted({layer for layer, _ in pairs}))
            chosen = any_heads(one, None, pairs)
            table = _measured(one, texts, copied, chosen, local)
            if streaming:
                assert window is not None
                options: dict[str, Any] = {"sinks": sinks, "window": window, "exact": exact, "seed": seed}
                table[["streaming", "streaming_exact"]], search = _streaming(one, texts, chosen, **options)
                searches.append(search)
            if needles is not None:
                table["retrieval"] = needle_attention(one.model, needles, chosen).mean(0).numpy()
            found.append(table)
    chance: Any = sum(found[1:]) / len(seeds) if seeds else None
    table = _compared(found[0], chance, threshold)
    table.attrs["start_token"] = int(copied[0, 0]) if copied.shape[1] % 2 else None
    if searches and searches[0]:
        table.attrs["search"] = searches[0]
    if seeds:
        table.attrs["random weights"] = described_copies("random", scales, seeds)
    return reading.note(table)


def _streaming(
    reading: ModelReading, texts: Texts, chosen: Chosen, *, sinks: int, window: int, exact: int, seed: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Measure the added loss of each head that sees only sinks and a window: whether it was run, and the search.

    If the search may run all heads, nothing is estimated.
    """
    heads = pairs_of(chosen)
    if 4 * exact >= len(heads):
        table = streaming_ablation(
            reading, texts.tokens, attention_mask=texts.real, sinks=sinks, window=window, heads=heads, progress=False
        )
        return table.set_index(_HEAD)[["effect"]].assign(exact=True), {}
    hidden = hooks_for(chosen, hiding("streaming_ablation", sinks, window))
    effects = head_effects(
        reading,
        texts.tokens,
        {"streaming": hidden},
        attention_mask=texts.real,
        heads=heads,
        exact=exact,
        seed=seed,
        progress=False,
    ).set_index(_HEAD)
    known = effects["exact"].notna()
    found = pd.DataFrame({"effect": effects["exact"].fillna(effects["estimate"]), "exact": known})
    return found, effects.attrs["runs"]["streaming"]


def repeated_tokens(model: Any, length: int | None, repeats: int, seed: int) -> Int[Tensor, "repeats pos"]:
    """Draw sequences of different random tokens, each repeated once, after the start token if the model has one."""
    # TransformerLens adds a token beyond the vocabulary to tokenizers that lack a special token.
    start = [x for x in (special_id(model, "bos"),) if x is not None and x < model.cfg.d_vocab]
    special = (special_id(model, "pad"), getattr(model.cfg, "pad_id", None), *start)
    usable = torch.tensor([x for x in range(model.cfg.d_vocab) if x not in special], device="cpu")
    room = (getattr(model.cfg, "n_ctx", None) or 2 * _LENGTH + 1) - len(start)
    most = min(len(usable), room // 2)
    length = min(most, _LENGTH) if length is None else check_integer("length", length, 2)
    if length > most:
        raise ArgumentError(
            "length",
            f"must be at most {most}, got {length}: the vocabulary has {len(usable)} usable tokens, and the "
            f"context fits {room // 2} tokens twice",
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(usable), generator=generator, device="cpu")[:length] for _ in range(repeats)]
    drawn = usable[torch.stack(orders)]
    first = torch.tensor(start, dtype=torch.int64, device="cpu").expand(repeats, -1)
    return torch.cat([first, drawn, drawn], 1).to(device_of(model))


def _compared(trained: pd.DataFrame, random: pd.DataFrame | None, threshold: float) -> pd.DataFrame:
    above = (trained if random is None else (trained - random) / (1 - random)) >= threshold
    names = [[name for name in _LABELS if row[name]] for _, row in above.iterrows()]
    labels = ["+".join(own or ["local"] * local) for own, local in zip(names, above["local"], strict=True)]
    columns = {"label": pd.Series(labels, index=trained.index, dtype="object")}
    for name in trained.columns:
        columns |= {name: trained[name]} | ({} if random is None else {f"{name}_random": random[name]})
    return pd.DataFrame(columns).reset_index()


def _measured(reading: ModelReading, texts: Texts, copied: Tensor, chosen: Chosen, local: int) -> pd.DataFrame:
    """Compute the measures of one model that need only its patterns, by layer and head."""
    specs, heads = [spec for spec, _ in chosen], {spec.layer: some for spec, some in chosen}
    sums: dict[tuple[str, int], Any] = defaultdict(float)

    def look(tokens: Tensor, measure: Callable[[Pattern], dict[str, Tensor]], n_texts: int) -> None:
        def add(spec: AttentionSpec, pattern: Pattern) -> None:
            some = of_heads(pattern, heads[spec.layer])
            by_head = [measure(one.double()) for one in some.split(1, 1)]  # takes less memory
            for column in by_head[0]:
                sums[column, spec.layer] += torch.cat([x[column] for x in by_head], 1).sum(0).cpu() * (1 / n_texts)

        for_each_pattern(reading.model, tokens, specs, add)

    for group in texts.groups:
        look(group.tokens, functools.partial(_of_text, local=local), len(texts.tokens))
    look(copied, functools.partial(_of_copies, n=copied.shape[1] // 2), len(copied))
    columns = {name: torch.cat([sums[name, spec.layer] for spec in specs]).tolist() for name in _LAYER_MEASURES}
    return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(pairs_of(chosen), names=_HEAD))


def _of_text(pattern: Pattern, local: int) -> dict[str, Float64[Tensor, "batch head"]]:
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


def _of_copies(pattern: Pattern, n: int) -> dict[str, Float64[Tensor, "batch head"]]:
    """Compute mean attention of the second copy's tokens to the same tokens in the first, and to those after them."""
    return {
        "duplicate_token": pattern.diagonal(-n, -2, -1)[..., -n:].mean(-1),
        "induction": pattern.diagonal(1 - n, -2, -1)[..., -n:].mean(-1),
    }
