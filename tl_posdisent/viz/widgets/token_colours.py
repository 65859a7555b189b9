"""A text with tokens coloured by a component of one head's additive fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

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
        fit: of scores ``[query, key]``, ``[head, query, key]`` or ``[text, head, query, key]``; or one for each layer,
            ``{layer: fit}``.
        tokens: the text, one string for each key, such as ``model.to_str_tokens(ids)``.
        heads: default all.
        text: which entry of the first axis, if the scores have four.
        scale: magnitude of the darkest colours, in units of the scores; default the largest there is.
        title: default says what is shown.

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
    return _show("key", fit, tokens, heads, text, scale=scale, title=title)


def show_query_bias(
    fit: AdditiveFit | Mapping[int, AdditiveFit],
    tokens: Sequence[str],
    *,
    heads: Iterable[int] | None = None,
    text: int = 0,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the text with tokens coloured by their query component.

    All scores of a red query are higher than the head's average, for every key; the softmax cancels this.

    Args:
        fit, heads, text, scale, title: as in ``show_key_importance``.
        tokens: the text, one string for each query (each key, where there are more keys: the last are the queries').

    Raises:
        ValueError: as in ``show_key_importance``.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model
        >>> from tl_posdisent.viz import show_query_bias
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> _, cache = model.run_with_cache(tokens)
        >>> show_query_bias(fit_additive(cache["attn_scores", 3]), model.to_str_tokens(tokens[0]))
        Widget('Query bias')
    """
    return _show("query", fit, tokens, heads, text, scale=scale, title=title)


_COMPONENTS = {
    "key": ("Key importance", "as a key, apart from distance and query."),
    "query": ("Query bias", "as a query; the softmax ignores that."),
}


def _show(component: Literal["key", "query"], fit: Any, tokens: Any, heads: Any, text: int, **look: Any) -> Widget:
    fits = {f"layer {layer}": one for layer, one in fit.items()} if isinstance(fit, Mapping) else {"": fit}
    shapes = {check_fit(one) for one in fits.values()}
    if len(shapes) != 1:
        raise ValueError(f"fit must be an AdditiveFit, or one of the same shape for each layer, got {sorted(shapes)}")
    *batch, n_query, n_key = next(iter(shapes))
    words = check_tokens(tokens, n_key)
    words = words[-n_query:] if component == "query" else words
    chosen, rows = check_heads(batch, heads, text)
    shown = {name: pick(getattr(one, component), rows, cell_axes=1) for name, one in fits.items()}
    title, note = _COMPONENTS[component]
    note = f"How much higher than the head's average a token's scores are {note} Point at a token for its number."
    layout = Layout(check_scale(look["scale"], shown.values()), check_title(look["title"], title), note)
    return coloured_text(shown, [str(head) for head in chosen], [text_token(word) for word in words], layout)
