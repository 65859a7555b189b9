"""Losses, divergences and accuracy of a model under interventions, each on all of its heads at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.full_runs import run_texts
from tl_posdisent.experiments.measuring.token_losses import by_token, correct, predicted
from tl_posdisent.hooks.named_hooks import UNMODIFIED, Interventions, named_hooks
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.statistics import Blocks, mean

_COLUMNS = ["intervention", "added_loss", "added_loss_se", "loss", "accuracy", "kl", "kl_se"]


def intervention_losses(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run the model under each intervention, on all of its heads at once, and tabulate what that costs.

    It takes one pass of all texts per intervention, and one without. ``head_effects`` measures each head alone.

    Args:
        model, tokens, attention_mask, ignore, progress: as in ``head_ablation``.
        interventions: hooks by name, of this package or your own, which may change anything.

    Returns:
        One row per intervention, after the row ``unmodified``, with means over the predicted tokens of all texts:

        * ``loss``, nats per predicted token, and ``added_loss``, minus that of the unmodified model;
        * ``kl``, KL(unmodified ‖ changed) of the predictions, nats per predicted token;
        * ``accuracy``, the share of next tokens that are predicted correctly;
        * ``added_loss_se`` and ``kl_se``, standard errors over texts or, if these are fewer than ten, equal parts of
          each text, treated as independent.

    Raises:
        ValueError: what is not a list of hooks by name; hooks that refuse this model or these texts; a model without
            logits; invalid tokens.

    Example:
        >>> from tl_posdisent import cut_text, demo_text, load_demo_model
        >>> from tl_posdisent import dummy_distance, intervention_losses, remap_distance
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=64, texts=2)
        >>> far = remap_distance(model, lambda d: d.clamp(max=16))
        >>> interventions = {"every distance 5": dummy_distance(model, 5), "at most 16": far}
        >>> table = intervention_losses(model, tokens, interventions, progress=False)
        >>> table["intervention"].tolist(), (table["added_loss"] > 0.5).tolist()
        (['unmodified', 'every distance 5', 'at most 16'], [False, True, False])
    """
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask, ignore)
    named = named_hooks(reading.model, interventions)
    rows = []
    with running(reading.model), tqdm(total=1 + len(named), desc="runs", disable=not progress) as bar:
        unmodified = run_texts(reading.model, texts)
        measure, inside = by_token(unmodified, texts, range(len(texts.tokens))), predicted(texts)
        blocks, before = Blocks.of_texts(inside.sum(1).tolist()), measure(unmodified)[inside][:, 0]
        for name, hooks in {UNMODIFIED: [], **named}.items():
            outputs = run_texts(reading.model, texts, [hooks] * len(texts.groups)) if hooks else unmodified
            losses, divergences = measure(outputs)[inside].unbind(1)
            of_blocks = blocks.means(torch.stack([losses - before, divergences], 1))
            (added, kl), errors = mean(of_blocks, blocks.sizes)
            values = (added, errors[0], losses.mean(), _accuracy(outputs, texts), kl, errors[1])
            rows.append((name, *map(float, values)))
            bar.update()
    return reading.note(pd.DataFrame(rows, columns=_COLUMNS))


def _accuracy(outputs: Sequence[Tensor], texts: Texts) -> float:
    """Return the share of the predictions of all texts that count and are correct."""
    found = [
        correct(output, group.tokens)[group.predictions.to(output.device)]
        for output, group in zip(outputs, texts.groups, strict=True)
    ]
    return torch.cat(found).double().mean().item()
