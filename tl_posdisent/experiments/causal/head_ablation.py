"""Ablate each head alone, and measure the effect on a metric."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.failures import note_failures
from tl_posdisent.experiments.measuring.metrics import (
    Metric,
    check_metric,
    is_loss,
    is_separable,
    metric_name,
    metric_values,
    next_token_loss,
)
from tl_posdisent.experiments.measuring.run_changes import run_changes
from tl_posdisent.hooks.ablate import AblationMode, ablate_heads, check_mode, derangement
from tl_posdisent.hooks.hook_list import Heads, any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import naming
from tl_posdisent.utils.statistics import mean
from tl_posdisent.utils.validation import listed


def head_ablation(
    model: Any,
    tokens: Tokens,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
    layers: Layers = None,
    heads: Heads = None,
    mode: AblationMode = "zero",
    reference: Tokens | Texts | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Ablate each head alone and measure the change of a metric.

    The numbers equal those of a loop over ``ablate_heads``, but are computed faster: layers before the ablated one are
    not run again, and several heads run in one batch, beside an unmodified row that must be as before. Where blocks
    share more than the residual stream, or the model has hooks of its own, all passes are full.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``. Dropout is disabled.
        tokens: ids ``[batch, pos]`` or, if the model has a tokenizer, a text or a list of texts of any lengths. Text is
            encoded by ``model.to_tokens``, which by default puts BOS in front, or EOS if the tokenizer has no BOS.
        metric: ``f(logits)`` or ``f(logits, tokens)``, called once for every head; returns a number, or one per text,
            which are averaged. At padding logits are NaN. Default: the loss, in nats per predicted token of all texts.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        ignore: token ids, such as those of a chat template, whose predictions are not counted.
        layers: default all that have attention.
        heads: query heads, default all: numbers, which apply to each of these layers, or labels ``"L4H2"`` and pairs
            ``(layer, head)``, which must be in ``layers``, if given.
        mode: "zero", "mean" or "resample", see ``ablate_heads``; "resample" needs texts of equal length, and "zero"
            depends on TransformerLens's weight processing if values have a bias.
        reference: texts for the mean, without padding; default ``tokens``. It leaves out ``ignore``, too.
        seed: seed of "resample".
        progress: show a progress bar.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``baseline`` (the metric of the unmodified model), ``value``
        (without the head), ``effect`` (value − baseline). Heads at which the model or the metric fails have NaN; a
        warning names one with its error, and ``attrs["failures"]`` all. Rows are in the order of layers and heads;
        ``table.sort_values("effect", key=abs, ascending=False)`` begins with the largest effects of either sign.

    Raises:
        ValueError: invalid arguments; a metric that does not return a number or one number per text, or returns one
            that is not finite.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, head_ablation, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> table = head_ablation(model, tokens, layers=[1, 4], progress=False)
        >>> top = table.sort_values("effect", key=abs).iloc[-1]  # the head with the largest effect of either sign
        >>> hooks = ablate_heads(model, [(int(top["layer"]), int(top["head"]))])
        >>> loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> len(table), bool(abs(loss - top["value"]) < 1e-4)  # the value is the loss without this head
        (16, True)
    """
    layers = listed("layers", layers)
    reading = read_model(model)
    pairs = pairs_of(any_heads(reading, layers, heads))
    texts = read_texts(reading.model, tokens, attention_mask, ignore)
    averaged: Any = texts if reference is None and mode == "mean" else reference
    check_mode(mode, averaged, seed)
    check_metric(metric, ignore)
    if averaged is not None and ignore is not None:
        with naming(tokens="reference"):
            averaged = read_texts(reading.model, averaged, ignore=ignore)
    if mode == "resample":
        derangement(len(texts.one_group('mode="resample"')), seed)
    ablations = {"ablated": ablate_heads(reading, pairs, mode=mode, reference=averaged, seed=seed)}
    together = mode == "resample" or not is_separable(metric)
    with tqdm(total=len(pairs) * len(texts.tokens), desc="heads", disable=not progress) as bar:
        found = run_changes(reading, texts, ablations, pairs, metric_values(metric), together=together, bar=bar)
    weights = found.predictions if is_loss(metric) else torch.ones_like(found.predictions)
    table = pd.DataFrame(pairs, columns=["layer", "head"])
    table["baseline"] = mean(found.unmodified, weights).value.item()
    table["value"] = mean(found["ablated"].T, weights).value.numpy()
    table["effect"] = table["value"] - table["baseline"]
    table.attrs["metric"] = metric_name(metric)
    return reading.note(note_failures(table, found.failures, found.n_runs))
