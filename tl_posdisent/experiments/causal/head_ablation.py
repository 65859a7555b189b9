"""Ablate each head alone and measure the effect on a metric, at a fraction of the cost of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.ablate import (
    AblationMode,
    StandIn,
    check_mode,
    check_reach,
    derangement,
    replace_heads,
    stand_in,
)
from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers
from tl_posdisent.models.partial_forward import (
    Clean,
    attempted,
    attention_from,
    has_hooks,
    of_texts,
    run_clean,
    run_from,
)
from tl_posdisent.models.reading.forward import evaluating, hook_name, output_of
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.observe import mismatch
from tl_posdisent.models.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.validation import check_integer

from .metrics import Metric, check_metric, next_token_loss, value_of

_BYTES_HELD = 2**28
_BYTES_PER_TENSOR = 2**22


def head_ablation(
    model: Any,
    tokens: Tokens,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    mode: AblationMode = "zero",
    reference: Tokens | Texts | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Ablate each head alone and measure the change of a metric.

    The numbers equal those of a loop over ``ablate_heads``, but are computed faster: layers before the ablated one are
    not run again (their output is that of the unmodified run), its attention runs once for many heads, and several
    heads run in one batch. Every batch includes an unmodified text; if its output differs from the unmodified run, the
    function falls back to full forward passes. Other hooks on the model are kept; since they may depend on the batch,
    only full forward passes are used then.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``. Dropout is off meanwhile.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer: one, or a list of any lengths.
        metric: ``f(logits, tokens)``, called with what the model returns for ``tokens``, once for every head: a number,
            or one for each text, of which the mean is taken. At padding its logits are NaN. Default: the mean loss of
            each text's next tokens, in nats.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        layers: default all that have attention.
        heads: query heads, default all: of each of these layers, or pairs ``(layer, head)``.
        mode: "zero", "mean" or "resample", see ``ablate_heads``; "resample" needs texts of equal length.
        reference: texts for the mean, without padding; default ``tokens``.
        seed: of "resample".
        batch_size: texts in one forward pass at most (but all of ``tokens``, where it must be); default by a rough
            estimate of what is fast on a processor and fits on a GPU.
        progress: show a bar.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``baseline`` (the metric of all heads), ``value`` (without the
        head), ``effect`` (value − baseline).

    Raises:
        ValueError: unusable tokens, layers, heads or mode; what ``ablate_heads`` refuses; a metric that returns neither
            a number nor one for each text, or one that is not finite; no ``metric`` for a model that returns no
            logits per token.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, head_ablation, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> table = head_ablation(model, tokens, layers=[1, 4], progress=False)
        >>> top = table.loc[table["effect"].idxmax()]  # the head with the largest effect
        >>> hooks = ablate_heads(model, [(int(top["layer"]), int(top["head"]))])
        >>> loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> len(table), bool(abs(loss - top["value"]) < 1e-4)  # the value is the loss without this head
        (16, True)
    """
    reading = read_model(model, layers)
    model, chosen = reading.model, reading.heads(layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    averaged: Any = texts if reference is None and mode == "mean" else reference
    check_mode(mode, averaged, seed)
    check_metric(metric)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    if mode == "resample":
        derangement(len(texts.one_group('mode="resample"')), seed)
    check_reach(model, list(chosen))
    with torch.no_grad(), evaluating(model):
        other = stand_in(model, list(chosen), mode, averaged, seed)
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    return reading.note(replace_each(model, texts, chosen, lambda group, layer: other, metric, **options))


def replace_each(
    model: Any,
    texts: Texts,
    chosen: dict[int, list[int]],
    stand_in_of: Callable[[TextGroup, int], StandIn],
    metric: Metric,
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Replace what each head alone gathers by something else, and measure a metric: the table of ``head_ablation``.

    Args:
        model, texts, metric, batch_size, progress: as there, checked.
        chosen: heads of each layer, with working ``hook_z`` (``check_reach``).
        stand_in_of: for texts of equal length and a layer, what replaces a head's z; asked for before the layer's runs.
    """
    with torch.no_grad(), evaluating(model):
        runs = [run_clean(model, group.tokens, list(chosen)) for group in texts.groups]
        baseline = value_of(metric, [clean.output for clean in runs], texts)
        given = list(zip(texts.groups, runs, strict=True))
        at_once = [batch_size or _texts_at_once(model, group.tokens, clean.output) for group, clean in given]
        ways, rows = [_ways(model, group.tokens, clean) for group, clean in given], []
        with tqdm(total=sum(map(len, chosen.values())), desc="heads", disable=not progress) as bar:
            for layer, some in chosen.items():
                tasks = [
                    _Task(model, group.tokens, stand_in_of(group, layer), clean, n)
                    for (group, clean), n in zip(given, at_once, strict=True)
                ]
                ablated = [_without_each(task, own, layer, some) for task, own in zip(tasks, ways, strict=True)]
                for head, *outputs in zip(some, *ablated, strict=True):
                    value = value_of(metric, outputs, texts)
                    rows.append((layer, head, baseline, value, value - baseline))
                    bar.update()
    return pd.DataFrame(rows, columns=["layer", "head", "baseline", "value", "effect"])


@dataclass(frozen=True)
class _Task:
    model: Any
    tokens: Int[Tensor, "batch pos"]
    replace: StandIn
    clean: Clean
    at_once: int  # texts in one pass


Way = Callable[[_Task, int, Sequence[int]], Any]
"""From a layer and some heads to outputs: all texts without the first head, without the second, …, and text 0 whole."""


def _attention_once(task: _Task, layer: int, heads: Sequence[int]) -> Any:
    """From the layer on, and its attention once for all heads: only what follows z differs between them."""
    hooks, texts = [_side_by_side(task, layer, heads)], _texts(task, heads)
    attention = attention_from(task.model, task.tokens, layer, task.clean, hooks)
    outputs = []
    for rows in torch.arange(len(texts), device=texts.device).split(task.at_once):
        part = of_texts(attention, rows)
        outputs.append(run_from(task.model, task.tokens, layer, task.clean, texts[rows], [], attention=part))
    return torch.cat(outputs)


def _from_the_layer(task: _Task, layer: int, heads: Sequence[int]) -> Any:
    """From the layer on."""
    hooks = [_side_by_side(task, layer, heads)]
    return run_from(task.model, task.tokens, layer, task.clean, _texts(task, heads), hooks)


def _from_the_start(task: _Task, layer: int, heads: Sequence[int]) -> Any:
    """Whole forward passes, heads side by side."""
    hooks = [_side_by_side(task, layer, heads)]
    return run_from(task.model, task.tokens, 0, task.clean, _texts(task, heads), hooks)


def _alone(task: _Task, layer: int, heads: Sequence[int]) -> Any:
    """What the model returns without these heads, in a plain forward pass."""
    with task.model.hooks(fwd_hooks=[replace_heads(layer, heads, task.replace)]):
        return output_of(task.model, task.tokens)


def _ways(model: Any, tokens: Int[Tensor, "batch pos"], clean: Clean) -> list[Way]:
    """The shortcuts to try, fastest first; none where others than this function may count on the batch as it is."""
    if has_hooks(model) or not isinstance(clean.output, Tensor) or len(clean.output) != len(tokens):
        return []
    return [_attention_once, _from_the_layer, _from_the_start]


def _without_each(task: _Task, ways: list[Way], layer: int, heads: Sequence[int]) -> Iterator[Any]:
    """What the model returns without each head of a layer. Ways that prove wrong are struck from the list."""
    heads, limit = list(heads), len(heads)
    while heads:
        some = heads[: min(limit, _heads_at_once(task, ways))]
        try:
            outputs = _proved(task, ways[0], layer, some) if ways else [_alone(task, layer, some)]
        except torch.OutOfMemoryError:
            if not ways:
                raise
            limit = len(some) // 2
            if limit == 0:
                ways.clear()
            continue
        if outputs is None:
            del ways[0]
            continue
        yield from outputs
        heads = heads[len(some) :]


def _proved(task: _Task, way: Way, layer: int, heads: Sequence[int]) -> list[Tensor] | None:
    """Outputs without each of the heads, if the text that ran along untouched came out as in the untouched run."""
    output = attempted(lambda: way(task, layer, heads))
    if output is None:
        return None
    same = output[-1].shape == task.clean.output[0].shape and mismatch(output[-1], task.clean.output[0]) <= 1
    return list(output[:-1].unflatten(0, (len(heads), -1))) if same else None


def _texts(task: _Task, heads: Sequence[int]) -> Int[Tensor, "row"]:
    """The texts in a batch: all for each head, and the first once more, as the proof."""
    n = len(task.tokens)
    return torch.tensor([*range(n)] * len(heads) + [0], device=task.tokens.device)


def _side_by_side(task: _Task, layer: int, heads: Sequence[int]) -> Any:
    """The hook that ablates each head in its own copy of the texts. It makes the copies, if the batch has none yet."""
    n = len(task.tokens)

    def edit(z: Tensor, hook: Any) -> Tensor:
        z = z[_texts(task, heads).to(z.device)] if len(z) == n else z.clone()
        for i, head in enumerate(heads):
            own = z[i * n : (i + 1) * n, :, head : head + 1]
            own.copy_(task.replace(layer, [head], own))
        return z

    return hook_name(layer, "hook_z"), edit


def _heads_at_once(task: _Task, ways: list[Way]) -> int:
    """How many heads to take together: for the fastest way, as many as what it holds of them leaves room for."""
    if not ways:
        return 1
    n = len(task.tokens)
    if ways[0] is not _attention_once:
        return max(1, task.at_once // n)
    output = task.clean.output
    numbers: int = 3 * output[0].numel() + task.tokens.shape[1] * 2 * getattr(task.model.cfg, "d_model", 0)
    size: int = output.element_size()
    return max(1, _room(output, _BYTES_HELD) // (n * numbers * size))


def _texts_at_once(model: Any, tokens: Int[Tensor, "batch pos"], output: Any) -> int:
    """How many texts to run in one pass, by a rough estimate of what it makes of each."""
    length, cfg = tokens.shape[1], model.cfg
    numbers: int = length * max(cfg.n_heads * length, 4 * getattr(cfg, "d_model", 0))
    return max(1, _room(output, _BYTES_PER_TENSOR) // (4 * numbers))


def _room(output: Any, on_cpu: int) -> int:
    """Bytes that may be taken. A processor is slower with tensors beyond its cache, a GPU faster with large ones."""
    if isinstance(output, Tensor) and output.device.type == "cuda":
        return int(torch.cuda.mem_get_info(output.device)[0]) // 16
    return on_cpu
