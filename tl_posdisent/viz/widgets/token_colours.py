"""A text with coloured tokens: key components of a fit, sources of one query's scores, or the loss that hooks add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.measuring.runs import run_texts
from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities, token_losses
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.models.reading.model_reading import model_of
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import check_tokens, read_texts, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer

from .layout import Layout, check_positions, check_scale, check_title, check_words, coloured_text, pick, pick_heads
from .offline import Widget, text_token
from .score_matrices import check_fit


def show_key_importance(
    fit: AdditiveFit | Mapping[int, AdditiveFit],
    tokens: Sequence[str],
    *,
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the text with tokens coloured by their key component: tokens with high scores for all queries.

    Red keys get more attention than the head's average from every query, blue ones less; 0.69 more doubles a key's
    weight in the softmax. A menu selects the head; all heads have the same colour scale.

    Args:
        fit: as in ``show_scores``, or one fit for each layer, ``{layer: fit}``.
        tokens, heads, text, positions, scale, title: as in ``show_scores``.

    Raises:
        ValueError: invalid arguments.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model
        >>> from tl_posdisent.viz import show_key_importance
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> _, cache = model.run_with_cache(tokens)
        >>> fits = {layer: fit_additive(cache["attn_scores", layer]) for layer in range(5)}
        >>> show_key_importance(fits, model.to_str_tokens(tokens[0]))
        Widget('Key importance')
    """
    fits = {f"layer {layer}": one for layer, one in fit.items()} if isinstance(fit, Mapping) else {"": fit}
    shapes = {check_fit(one) for one in fits.values()}
    if len(shapes) != 1:
        raise ArgumentError(
            "fit", f"must be an AdditiveFit, or one of the same shape for each layer, got {sorted(shapes)}"
        )
    *batch, _, n_key = next(iter(shapes))
    words, at = check_words(tokens, n_key), check_positions(positions, n_key)
    chosen, rows = pick_heads(batch, heads, text)
    shown = {name: pick(one.key, rows, cell_axes=1)[:, at] for name, one in fits.items()}
    note = "How much higher than the head's average a token's scores are as a key, apart from distance and query."
    scale = check_scale(scale, shown.values(), first=at[0] == 0)
    layout = Layout(scale, check_title(title, "Key importance"), note)
    return coloured_text(shown, [str(head) for head in chosen], [text_token(words[i]) for i in at], layout)


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
    model = model_of(model)
    ids = check_tokens(model, tokens)
    check_integer("text", text, 0, len(ids) - 1)
    ids = ids[text : text + 1]
    texts, hooks = read_texts(model, ids, None), check_hooks(model, hooks)
    runs = [run_texts(model, texts, [some])[0] for some in ([], hooks)]
    before, after = (token_losses(as_log_probabilities(logits), ids.to(logits.device)) for logits in runs)
    added = after - before
    if not bool(added.isfinite().all()):
        raise ArgumentError("hooks", "must leave every token's loss finite, got NaN or infinite losses")
    shown = {"": pad(added, (1, 0)).cpu()}
    note = f"Loss added to each token, in nats; {added.mean():+.3f} on average. The first token is not predicted."
    layout = Layout(check_scale(scale, shown.values()), check_title(title, "Added loss"), note)
    return coloured_text(shown, [""], [text_token(word) for word in token_words(model, ids[0])], layout)
