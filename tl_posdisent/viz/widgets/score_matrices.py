"""Widgets of scores, components and patterns, also before and after hooks. Only the shown cells are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.additive.cells import make_cells
from tl_posdisent.additive.result import AdditiveFit, as_fitted
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.experiments.attention_scores.attention_by_distance import check_shown
from tl_posdisent.hooks.applied import applied, check_hooks
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.texts import read_texts, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_flag, is_integer, listed
from tl_posdisent.viz.widgets.charts import Widget
from tl_posdisent.viz.widgets.selection import Choice, Options, choose, pick

ScoreComponent = Literal["scores", "fitted", "residual", "distance", "query", "key"]
_COMPONENTS = get_args(ScoreComponent)
Matrices = Float64[Tensor, "head query key"]
_MEAN = "Scores and fitted scores are shown without each head's mean."


def show_scores(
    fit: AdditiveFit,
    tokens: Sequence[str],
    component: ScoreComponent = "fitted",
    *,
    scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any = None,
    heads: Iterable[int] | None = None,
    layer: int | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    centred: bool = True,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show one component of the scores for all heads: each as a thumbnail, and the selected head in full size.

    All components of the same heads have the same colour scale, so that two calls can be compared. Cells outside the
    fit's mask are 0; cells after the query are grey.

    Args:
        fit: of scores ``[query, key]``, ``[head, query, key]`` or ``[text, head, query, key]``.
        tokens: the text, one string for each key, such as ``model.to_str_tokens(ids)``.
        component: ``"fitted"`` is the sum of ``"distance"``, ``"query"`` and ``"key"``; ``"scores"`` and ``"residual"``
            (scores minus fitted) need ``scores``.
        scores: the fitted scores, which the fit does not store: what ``fit_additive`` was given.
        heads: default all.
        layer: the layer in the heads' names; for a fit of several layers, the one to show.
        text: index on the first axis, if the scores have four axes.
        positions: positions to show as queries and as keys, ascending; default all.
        centred: subtract each head's mean (``fit.intercept``) from the scores and the fitted scores.
        scale: magnitude of the darkest colours, in units of the scores; default the largest magnitude in the chosen
            heads without the first key, which often is an attention sink. Larger values have the darkest colours.
        title: the default describes the content.

    Raises:
        ValueError: invalid arguments; more cells than a browser can draw; the error suggests selections that fit.

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
        raise ArgumentError("scores", f"must be given to show the component {component!r}: the fit does not keep them")
    options = Options(heads, text, positions, scale, title, layer)
    choice = choose(check_fit(fit), tokens, options, layers=fit.layers)
    components = _components(fit, choice, scores, centred=centred)
    titles = {"fitted": "the fitted scores", "scores": "the scores", "residual": "what the fit leaves of the scores"}
    return choice.draw(
        {component: components[component]},
        titles.get(component, f"the {component} component of the scores"),
        _MEAN if centred and component in ("scores", "fitted") else "",
        causal=fit.cells.low >= 0,
        scaled_by=components.values(),
    )


def show_parts(
    fit: AdditiveFit,
    tokens: Sequence[str],
    head: int,
    *,
    scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any = None,
    layer: int | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    centred: bool = True,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show all components of one head's scores, in one colour scale: distance + query + key = fitted.

    With ``scores``, the scores and the residual are shown too: fitted + residual = scores.

    Args:
        fit, tokens, scores, layer, text, positions, centred, scale, title: as in ``show_scores``.
        head: index on the fit's axis of heads, not a label: a fit does not know of which layers its scores are.

    Raises:
        ValueError: as in ``show_scores``.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_parts
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> scores = cache["attn_scores", 3]
        >>> show_parts(fit_additive(scores), model.to_str_tokens(tokens[0]), 2, scores=scores, layer=3)
        Widget('L3H2: the scores and their components')
    """
    check_fit(fit)
    if not is_integer(head):
        raise ArgumentError("head", f"must be an integer, got {head!r}")
    names = [name for name in _COMPONENTS if scores is not None or name not in ("scores", "residual")]
    options = Options([head], text, positions, scale, title, layer)
    choice = choose(check_fit(fit), tokens, options, charts=len(names), layers=fit.layers)
    components = _components(fit, choice, scores, centred=centred)
    return choice.draw(
        {name: components[name] for name in names},
        "the scores and their components",
        "distance + query + key = fitted. " + (_MEAN if centred else ""),
        causal=fit.cells.low >= 0,
    )


def show_patterns(
    fit: AdditiveFit,
    tokens: Sequence[str],
    pattern: Float[Tensor, "*batch query key"],
    *,
    heads: Iterable[int] | None = None,
    layer: int | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the model's attention pattern and that of the additive scores, head by head.

    The additive pattern is the softmax of ``fit.fitted()`` over the fit's mask.

    Args:
        fit, tokens, heads, layer, text, positions, scale, title: as in ``show_scores``.
        pattern: the model's own pattern, in the fit's shape, such as ``cache["pattern", 3]``.

    Raises:
        ValueError: as in ``show_scores``; a pattern of another shape, or whose numbers are not probabilities.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_patterns
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> _, cache = model.run_with_cache(tokens)
        >>> fit = fit_additive(cache["attn_scores", 3])
        >>> show_patterns(fit, model.to_str_tokens(tokens[0]), cache["pattern", 3])
        Widget('Attention patterns of the model and of its additive scores')
    """
    if tuple(check_scores(pattern, "pattern").shape) != check_fit(fit):
        raise ArgumentError("pattern", f"must have the fitted shape {check_fit(fit)}, got {tuple(pattern.shape)}")
    options = Options(heads, text, positions, scale, title, layer)
    choice = choose(check_fit(fit), tokens, options, charts=2, layers=fit.layers)
    additive, inside = _additive_pattern(fit, choice)
    own = choice.of(pattern.detach()).to(additive.device)
    if not bool(((own >= 0) & (own <= 1.01))[inside].all()):  # 1.01: bfloat16
        raise ArgumentError("pattern", "must be probabilities, from 0 to 1, as the softmax of scores is")
    return choice.draw(
        {"model": torch.where(inside, own, 0.0), "additive": additive},
        "attention patterns of the model and of its additive scores",
        "The rows of a whole text add up to 1.",
        causal=fit.cells.low >= 0,
    )


def check_fit(fit: Any) -> tuple[int, ...]:
    """Check the type of a fit and return the shape of its scores."""
    if not isinstance(fit, AdditiveFit):
        raise ArgumentError("fit", f"must be an AdditiveFit, got {type(fit).__name__}")
    return (*fit.intercept.shape, fit.cells.n_query, fit.cells.n_key)


def _components(fit: AdditiveFit, choice: Choice, scores: Any, *, centred: bool) -> dict[str, Matrices]:
    """Compute all components of the chosen cells, 0 outside the mask; without the intercept if ``centred``."""
    check_flag("centred", centred)
    components, mean, inside = _cells(fit, choice, choice.positions)
    fitted = components["distance"] + components["query"] + components["key"] + (0.0 if centred else mean)
    components["fitted"] = fitted
    if scores is not None:
        components["scores"] = choice.of(as_fitted(fit, scores)).to(mean.device) - (mean if centred else 0.0)
        components["residual"] = components["scores"] - fitted
    return {name: torch.where(inside, x, 0.0) for name, x in components.items()}


def _additive_pattern(fit: AdditiveFit, choice: Choice) -> tuple[Matrices, Bool[Tensor, "head query key"]]:
    """Compute the chosen cells of the softmax of the fitted scores, and which of them are inside the mask."""
    components, mean, inside = _cells(fit, choice, range(fit.cells.n_key))
    fitted = components["distance"] + components["query"] + components["key"] + mean
    pattern = fitted.masked_fill(~inside, -torch.inf).softmax(-1)[:, :, choice.positions]
    inside = inside[:, :, choice.positions]
    return torch.where(inside, pattern, 0.0), inside  # a row without keys has no softmax


def _cells(
    fit: AdditiveFit, choice: Choice, keys: Sequence[int]
) -> tuple[dict[str, Matrices], Float64[Tensor, "head 1 1"], Bool[Tensor, "head query key"]]:
    """Return the three components at the chosen queries and these keys, the intercept, and the mask."""
    cells, device = fit.cells, fit.query.device
    rows, columns = (torch.tensor(list(x), device=device) for x in (choice.positions, keys))
    block = cells.inside(slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    inside = block[..., rows - rows[0], :][..., columns - columns[0]]
    inside = pick(inside.expand(*fit.intercept.shape, *inside.shape[-2:]), choice.rows)
    distance, query, key = (pick(x, choice.rows, cell_axes=1) for x in (fit.distance, fit.query, fit.key))
    components = {
        "distance": distance[:, (rows[:, None] - columns).clamp(cells.low, cells.high) - cells.low],
        "query": query[:, rows, None].expand(inside.shape),
        "key": key[:, None, columns].expand(inside.shape),
    }
    return components, pick(fit.intercept, choice.rows, cell_axes=0)[:, None, None], inside


What = Literal["pattern", "scores"]


def _change(before: Tensor, after: Tensor, tokens: Any, mask: Any, options: Options, title: str) -> Widget:
    choice = choose(before.shape, tokens, options, charts=3)
    at = torch.tensor(choice.positions)
    cells = make_cells(before.shape[-2:], mask)
    inside = cells.to_mask()[at][:, at]
    old, new = (torch.where(inside, choice.of(x.detach().cpu()), 0.0) for x in (before, after))
    for name, x in (("before", old), ("after", new)):
        if bool((x <= masked_below(x.dtype)).any()) or not bool(x.isfinite().all()):
            raise ArgumentError(name, "must be finite inside the mask, got NaN, infinite or masked scores")
    shown = {"before": old, "after": new, "change": new - old}
    return choice.draw(shown, title, "change = after − before.", causal=cells.low >= 0)


def show_interventions(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    hooks: Sequence[Hook],
    *,
    layer: int,
    what: What = "pattern",
    heads: Iterable[int] | None = None,
    text: int = 0,
    positions: Iterable[int] | None = None,
    scale: float | None = None,
    title: str | None = None,
) -> Widget:
    """Show the attention of a layer's heads without and with an intervention, such as a dummy distance.

    The model runs twice, without gradients, and is left unchanged. A hook that does not fire raises an error.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        hooks: hooks of an intervention, or any ``fwd_hooks``.
        layer: the layer whose attention to show; the hooks may act anywhere.
        what: ``"pattern"``, or ``"scores"`` if the model exposes them.
        heads, text, positions, scale, title: as in ``show_scores``.

    Raises:
        ValueError: invalid arguments; a layer that does not expose its scores, or whose pattern would not reflect
            an edit of its scores through ``hook_z``; more cells than a browser can draw.
        RuntimeError: a hook that never fired.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model, show_interventions
        >>> model, tokens = load_demo_model(), demo_tokens(length=16)
        >>> show_interventions(model, tokens, dummy_distance(model, 3), layer=4, title="All keys at distance 3")
        Widget('All keys at distance 3')
    """
    check_choice("what", what, get_args(What))
    reading = read_model(model)
    (spec,), model = reading.specs([layer]), reading.model
    ids = read_texts(model, tokens).one_group("show_interventions")
    options = Options(listed("heads", heads), text, listed("positions", positions), scale, title, layer)
    # Refuse what cannot be drawn before the model runs.
    choose((len(ids), spec.n_heads, ids.shape[1], ids.shape[1]), [""] * ids.shape[1], options, charts=3)
    tap = spec.taps.pattern if what == "pattern" else spec.taps.scores
    if tap is None:
        raise ValueError(f"layer {layer} of {spec.architecture} does not show its {what}")
    hooks = check_hooks(model, hooks)
    before, after = _seen(model, ids, tap, []), _seen(model, ids, tap, hooks)
    check_shown(spec, hooks)
    words, mask = token_words(model, ids[text]), spec.mask(ids.shape[1], before.device)
    return _change(before, after, words, mask, options, f"{what} before and after")


def _seen(model: Any, ids: Tensor, tap: str, hooks: Sequence[Hook]) -> Tensor:
    with applied(model, hooks), running(model) as p:
        return p.record(ids, [tap])[tap]
