"""Score matrices of heads as circuitsvis widgets: the scores, their components, and the attention patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.utils.validation import check_choice, is_integer

from .fit_cells import additive_pattern, causal, check_alike, check_fit, components_of
from .layout import head_selector
from .offline import Widget
from .raster import beside
from .selection import CELLS, Options, choose

ScoreComponent = Literal["scores", "fitted", "distance", "query", "key", "residual"]
_COMPONENTS = get_args(ScoreComponent)


def show_scores(
    fit: AdditiveFit,
    tokens: Sequence[str],
    component: ScoreComponent = "fitted",
    *,
    scores: Float[Tensor, "*batch query key"] | None = None,
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    centred: bool = True,
    scale: float | None = None,
    title: str | None = None,
    max_cells: int = CELLS,
    raster: bool = False,
    cdn: bool = False,
) -> Widget:
    """Show one component of the scores for all heads: small, and the selected head in full size.

    Red is positive, blue negative, white 0. All components of the same heads have the same colour scale, so that two
    calls can be compared. Cells outside the fit's mask are 0, and grey after the query.

    Args:
        fit: of scores ``[query, key]``, ``[head, query, key]`` or ``[text, head, query, key]``.
        tokens: the text, one string for each key, such as ``model.to_str_tokens(ids)``. Spaces are shown as ``·``, line
            breaks as ``↵``; axes show at most 24 characters of each.
        component: ``"fitted"`` is the sum of ``"distance"``, ``"query"`` and ``"key"``; ``"scores"`` and ``"residual"``
            (scores less fitted) need ``scores``.
        scores: the fitted scores, which the fit does not store.
        heads: default all.
        text: which entry of the first axis, if the scores have four.
        positions: which to show, as queries and as keys, ascending; default all. Where some are left out at the
            beginning or in between, the axes show ``token@position``.
        centred: subtract each head's mean (``fit.intercept``) from the scores and the fitted scores, as the components
            have mean 0 and the softmax cancels it. False shows the original values.
        scale: magnitude of the darkest colours, in units of the scores; default the largest there is in the
            chosen heads.
        title: default describes the content.
        max_cells: raise an error for more cells.
        raster: draw images instead of charts, a pixel for each cell: for some 4000 positions of a head, or 500 of 64.
            Beyond 1024 positions a pixel is the mean of a square of cells. A list chooses the head.
        cdn: link to circuitsvis at unpkg.com (a widget of kilobytes that needs a network) instead of including it.

    Returns:
        A ``Widget``: circuitsvis's ``RenderedHTML`` with ``save(path)``.

    Raises:
        ValueError: unusable arguments; more cells than ``max_cells``, with a choice that is not.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_scores
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> fit = fit_additive(cache["attn_scores", 3])
        >>> show_scores(fit, model.to_str_tokens(tokens[0]), "distance", heads=[0, 1])
        Widget('The distance component of the scores')
    """
    check_choice("component", component, _COMPONENTS)
    check_fit(fit)
    if scores is None and component in ("scores", "residual"):
        raise ValueError(f"scores must be given to show the component {component!r}: the fit does not keep them")
    options = Options(heads, text, positions, scale, title, max_cells, raster, cdn)
    choice = choose(check_fit(fit), tokens, options, more=1)
    components = components_of(fit, choice, scores, centred=centred)
    titles = {"fitted": "The fitted scores", "scores": "The scores", "residual": "What the fit leaves of the scores"}
    layout = choice.layout(
        components.values(),
        titles.get(component, f"The {component} component of the scores"),
        _mean_note(centred and component in ("scores", "fitted")),
        causal=causal(fit),
    )
    if raster:
        return beside({"": components[component]}, choice, layout)
    return head_selector(components[component], choice.names, choice.tokens, layout)


def show_parts(
    fit: AdditiveFit,
    tokens: Sequence[str],
    head: int,
    *,
    scores: Float[Tensor, "*batch query key"] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    centred: bool = True,
    scale: float | None = None,
    title: str | None = None,
    max_cells: int = CELLS,
    raster: bool = False,
    cdn: bool = False,
) -> Widget:
    """Show all components of one head's scores side by side, in one colour scale: distance + query + key = fitted.

    With ``scores`` these and the residual are shown too: fitted + residual = scores.

    Args:
        fit, tokens, scores, text, positions, centred, scale, title, max_cells, raster, cdn: as in ``show_scores``.
        head: its number.

    Raises:
        ValueError: as in ``show_scores``.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_parts
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> scores = cache["attn_scores", 3]
        >>> show_parts(fit_additive(scores), model.to_str_tokens(tokens[0]), 2, scores=scores)
        Widget('Head 2: the scores and their components')
    """
    check_fit(fit)
    if not is_integer(head):
        raise ValueError(f"head must be an integer, got {head!r}")
    names = [name for name in _COMPONENTS if scores is not None or name not in ("scores", "residual")]
    options = Options([head], text, positions, scale, title, max_cells, raster, cdn)
    choice = choose(check_fit(fit), tokens, options, charts=len(names))
    components = components_of(fit, choice, scores, centred=centred)
    layout = choice.layout(
        components.values(),
        f"Head {head}: the scores and their components",
        "distance + query + key = fitted. " + _mean_note(centred),
        causal=causal(fit),
    )
    return beside({name: components[name] for name in names}, choice, layout)


def show_patterns(
    fit: AdditiveFit,
    tokens: Sequence[str],
    pattern: Float[Tensor, "*batch query key"],
    *,
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
    max_cells: int = CELLS,
    raster: bool = False,
    cdn: bool = False,
) -> Widget:
    """Show the model's attention pattern beside that of the additive scores, head by head.

    The additive pattern is the softmax of ``fit.fitted()`` over the fit's mask: the attention of the head if its scores
    were exactly the sum of a distance, a query and a key component. The query component has no effect on it.

    Args:
        fit, tokens, heads, text, positions, scale, title, max_cells, raster, cdn: as in ``show_scores``.
        pattern: the model's own, of the fit's shape, such as ``cache["pattern", 3]``.

    Raises:
        ValueError: as in ``show_scores``; a pattern of another shape, or of numbers that are no probabilities.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_patterns
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> fit = fit_additive(cache["attn_scores", 3])
        >>> show_patterns(fit, model.to_str_tokens(tokens[0]), cache["pattern", 3])
        Widget('Attention patterns: the model and its additive scores')
    """
    check_alike(fit, "pattern", pattern)
    options = Options(heads, text, positions, scale, title, max_cells, raster, cdn)
    choice = choose(check_fit(fit), tokens, options, charts=2)
    additive, inside = additive_pattern(fit, choice)
    own = choice.of(pattern.detach()).to(additive.device)
    if not bool(((own >= 0) & (own <= 1.01))[inside].all()):  # 1.01: bfloat16
        raise ValueError("pattern must be probabilities, from 0 to 1, as the softmax of scores is")
    shown = {"model": torch.where(inside, own, 0.0), "additive scores": additive}
    note = "Rows are queries; those of a whole text add up to 1."
    default = "Attention patterns: the model and its additive scores"
    return beside(shown, choice, choice.layout(shown.values(), default, note, causal=causal(fit)))


def _mean_note(centred: bool) -> str:
    return "Scores and fitted scores are shown without each head's mean." if centred else ""
