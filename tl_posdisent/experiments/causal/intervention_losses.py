"""Losses and divergences under interventions, each on all of its heads at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading.forward_pass import Hook

from .metrics import as_log_probabilities, divergences, next_token_accuracy, run_under, token_losses


def intervention_losses(
    model: Any, tokens: Int[Tensor, "batch pos"], interventions: Mapping[str, Sequence[Hook]]
) -> pd.DataFrame:
    """Run the model without and with each list of hooks, and tabulate losses and divergences.

    Returns:
        One row per intervention, after the row ``unmodified``: ``loss``, nats per predicted token; ``added_loss`` and
        ``added_loss_se``, the difference from the unmodified model and its standard error over texts (NaN for one
        text); ``kl``, KL(unmodified ‖ changed) of the predictions, nats per predicted token; ``accuracy``, the share of
        next tokens that are predicted correctly.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).view(2, 64)
        >>> table = intervention_losses(model, tokens, {"distance 5": dummy_distance(model, 5)})
        >>> table["intervention"].tolist(), (table["added_loss"] > 0.1).tolist()
        (['unmodified', 'distance 5'], [False, True])
    """
    clean, rows = as_log_probabilities(run_under(model, tokens, [])), []
    before = token_losses(clean, tokens).double().mean(1)
    for name, hooks in {"unmodified": [], **interventions}.items():
        log_p = clean if name == "unmodified" else as_log_probabilities(run_under(model, tokens, hooks))
        loss = token_losses(log_p, tokens).double().mean(1)
        added = loss - before
        rows.append(
            {
                "intervention": name,
                "loss": float(loss.mean()),
                "added_loss": float(added.mean()),
                "added_loss_se": float(added.std() / len(added) ** 0.5) if len(added) > 1 else nan,
                "kl": float(divergences(clean, log_p)[:, :-1].double().mean()),
                "accuracy": float(next_token_accuracy(log_p, tokens).mean()),
            }
        )
    return pd.DataFrame(rows)
