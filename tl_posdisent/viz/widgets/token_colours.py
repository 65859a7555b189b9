"""A text with tokens coloured by the key component of one head's additive fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tl_posdisent.additive.result import AdditiveFit

from .layout import Layout, coloured_text
from .offline import Widget, text_token
from .score_matrices import check_fit
from .selection import check_heads, check_scale, check_title, check_tokens, pick


def show_key_importance(
    fit: AdditiveFit | Mapping[int, AdditiveFit],
    tokens: Sequence[str],
    *,
    heads: Iterable[int] | None = None,
    text: int = 0,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the text with tokens coloured by their key component: tokens with high scores for all queries.

    Red keys get more attention than the head's average from every query, blue ones less; 0.69 more doubles a key's
    weight in the softmax. A list chooses the head; all have the same colour scale.

    Args:
        fit: as in ``show_scores``; or one for each layer, ``{layer: fit}``.
        tokens, heads, text, scale, title: as in ``show_scores``.

    Raises:
        ValueError: unusable arguments.

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
        raise ValueError(f"fit must be an AdditiveFit, or one of the same shape for each layer, got {sorted(shapes)}")
    *batch, _, n_key = next(iter(shapes))
    words = [text_token(word) for word in check_tokens(tokens, n_key)]
    chosen, rows = check_heads(batch, heads, text)
    shown = {name: pick(one.key, rows, cell_axes=1) for name, one in fits.items()}
    note = "How much higher than the head's average a token's scores are as a key, apart from distance and query."
    layout = Layout(check_scale(scale, shown.values()), check_title(title, "Key importance"), note)
    return coloured_text(shown, [str(head) for head in chosen], words, layout)
