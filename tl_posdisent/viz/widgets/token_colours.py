"""A text with tokens coloured by the loss that hooks add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from tl_posdisent.experiments.measuring.full_runs import run_texts
from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities, token_losses
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import read_texts, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer

from .charts import Widget, check_scale, check_title, coloured_text, text_token


def show_loss_change(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    hooks: Sequence[Hook],
    *,
    text: int = 0,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the text with each token coloured by what an intervention adds to its loss, in nats.

    Red tokens are predicted worse, blue ones better; hovering shows the number. The first token, which nothing
    predicts, is 0. The model runs twice, without gradients, and is left unchanged.

    Args:
        model, tokens: as in ``show_interventions``.
        hooks: hooks of an intervention, or any ``fwd_hooks``; a hook that does not fire raises an error.
        text: index of the text to show.
        scale, title: as in ``show_scores``.

    Raises:
        ValueError: invalid arguments; a model without logits, or a loss that is not finite.
        RuntimeError: a hook that never fired.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> from tl_posdisent.viz import show_loss_change
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> show_loss_change(model, tokens, dummy_distance(model, 3))
        Widget('Added loss')
    """
    model = read_model(model).model
    texts, hooks = read_texts(model, tokens), check_hooks(model, hooks)
    texts = texts.take([check_integer("text", text, 0, len(texts.tokens) - 1)])
    ids = texts.groups[0].tokens
    runs = [run_texts(model, texts, [some])[0] for some in ([], hooks)]
    before, after = (token_losses(as_log_probabilities(logits), ids.to(logits.device)) for logits in runs)
    added = after - before
    if not bool(added.isfinite().all()):
        raise ArgumentError("hooks", "must leave every token's loss finite, got NaN or infinite losses")
    values = pad(added[0], (1, 0)).cpu()
    return coloured_text(
        values,
        [text_token(word) for word in token_words(model, ids[0])],
        scale=check_scale(scale, [values]),
        title=check_title(title, "Added loss"),
        note=f"Loss added to each token, in nats; {added.mean():+.3f} on average. The first token is not predicted.",
    )
