"""Check on one model that every tool does what it says, on short, long and padded texts and with a KV cache."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.attention.fit import fit_attention
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.frequencies import limit_frequencies, phase_noise
from tl_posdisent.hooks.length_extension import lambda_mask, position_interpolation
from tl_posdisent.hooks.patch import MovedComponent, patch_scores, patch_vectors
from tl_posdisent.hooks.positions import dummy_distance, remap_distance, swap_positions
from tl_posdisent.hooks.score_components import drop_component
from tl_posdisent.hooks.substitute import substitute_additive
from tl_posdisent.hooks.substitute_attention import substitute_attention
from tl_posdisent.models.capture import capture
from tl_posdisent.models.chunked_scores import empty_cache, with_mask
from tl_posdisent.models.partial_forward import forwards
from tl_posdisent.models.reading.forward import Hook, device_of, evaluating, padding_id
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.validation import check_choice, check_flag, check_integer, check_seed

from .attention_scores.additivity import additivity
from .attention_scores.controlled_distance import controlled_distance
from .causal.head_ablation import head_ablation
from .causal.head_patching import head_patching
from .causal.position_patching import component_patching, position_patching

TOLERANCE = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative error that rounding explains, by the dtype of the model. Rotation tables are float32 at best."""

Law = tuple[str, float]
"""What must be equal, and its error relative to the largest number that is compared; inf for an absent effect."""


def check_model(
    model: Any,
    *,
    tools: Sequence[str] | None = None,
    every_layer: bool = False,
    lengths: int | Sequence[int] = (12, 48),
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Check every tool of this package on a model: does it do what it says, and is what it cannot do refused?

    Each tool is tried against laws that hold for any model: an intervention with the real positions changes nothing,
    other positions do change something, a fit is that of dense least squares, an ablation is that of zeros in the
    attention's output, a text in a padded batch gives what it gives alone, and a text read token by token with a KV
    cache gives what it gives in one pass. Tokens are drawn at random.

    Args:
        model: a HookedTransformer, a TransformerBridge or alike, or its ``read_model``. Laws are checked in its own
            dtype: to 2e-4 in float32 and float64, 2e-2 in float16, 8e-2 in bfloat16.
        tools: which to check, by name; default all.
        every_layer: whether to check all layers. Default the first two of each kind (that differ in rotation, window,
            soft cap or heads); the layers after the last of them are skipped, so that a deep model takes little time.
        lengths: of the texts, in tokens. Where the rotation changes beyond some length (longrope, dynamic NTK), give
            one beyond it as well. The first is also that of the padded and the cached texts.
        seed: of the random tokens.
        progress: whether to show a progress bar.

    Returns:
        One row per tool and text (only one for a tool that refuses the text itself):

        * ``tool``;
        * ``text``: for instance ``"12 tokens"``, ``"padded"`` or ``"KV cache"``;
        * ``verdict``: ``"works"``, ``"refused"`` or ``"wrong"``;
        * ``error``: the largest relative error of the tool's laws, NaN where refused;
        * ``reason``: the law that fails, or the refusal.

    Raises:
        ValueError: tools that do not exist, lengths below 4, a model that ``read_model`` refuses.

    Example:
        >>> from tl_posdisent import check_model, load_demo_model
        >>> table = check_model(load_demo_model(), tools=["additivity", "swap_positions"], lengths=12, progress=False)
        >>> table[["tool", "text", "verdict"]].to_string(index=False, header=False).splitlines()
        ['    additivity 12 tokens   works', '    additivity    padded   works',
         'swap_positions 12 tokens   works', 'swap_positions    padded   works', 'swap_positions  KV cache   works']
    """
    check_seed(seed)
    check_flag("every_layer", every_layer)
    chosen = list(TOOLS) if tools is None else list(tools)
    for tool in chosen:
        check_choice("tools", tool, TOOLS)
    sizes = [check_integer("lengths", x, 4) for x in ([lengths] if isinstance(lengths, int) else lengths)]
    reading = read_model(model)
    if not every_layer:
        tried = [spec.layer for spec in two_of_each_kind(reading.attention)]
        reading = replace(reading, without_attention=tuple(sorted({*range(reading.n_layers)} - {*tried})))
    trials = {f"{size} tokens": Trial(reading, random_tokens(reading.model, size, seed)) for size in sizes}
    tolerance = max(TOLERANCE[p.dtype] for p in reading.model.parameters() if p.dtype in TOLERANCE)
    rows: list[dict[str, Any]] = []
    with first_blocks(reading.model, reading.n_layers if every_layer else reading.attention[-1].layer + 1):
        for tool in tqdm(chosen, desc="check_model", disable=not progress):
            for text, laws in _laws(tool, trials):
                rows.append({"tool": tool, "text": text, **_verdict(laws, tolerance)})
                if rows[-1]["verdict"] == "refused" and text in trials:
                    break  # padded or in parts it would be refused again
    return pd.DataFrame(rows, columns=["tool", "text", "verdict", "error", "reason"])


def two_of_each_kind(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """The first two layers of each kind of attention, in the model's order."""
    kinds: dict[Any, list[AttentionSpec]] = {}
    for spec in specs:
        frequencies = [] if spec.rotary is None else [f"{x:.3g}" for x in spec.rotary.frequencies.tolist()]
        heads = (spec.n_heads, spec.n_kv_heads, spec.d_head)
        kind = (*frequencies, heads, spec.window, spec.soft_cap, spec.problem is None, spec.no_rotation is None)
        kinds.setdefault(kind, []).append(spec)
    return tuple(sorted((x for alike in kinds.values() for x in alike[:2]), key=lambda spec: spec.layer))


@contextlib.contextmanager
def first_blocks(model: Any, n: int) -> Iterator[None]:
    """Let the model consist of its first n blocks: those after them return what the n-th returned."""
    last, returned = model.blocks[n - 1], list[Any]()
    own = last.forward

    def record(*args: Any, **kwargs: Any) -> Any:
        returned[:] = [own(*args, **kwargs)]
        return returned[0]

    skipped = {block: lambda *args, **kwargs: returned[0] for block in model.blocks[n:]}
    with forwards({last: record, **skipped} if skipped else {}):
        yield


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, a text that it reads, and what the laws compare."""

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]

    @property
    def head(self) -> int:
        """The head on which tools for single heads are tried."""
        return min(1, self.reading.attention[0].n_heads - 1)

    @property
    def layer(self) -> int:
        """The first layer that rotates, or else the first that attends."""
        attention = self.reading.attention
        return next((spec.layer for spec in attention if spec.rotary is not None), attention[0].layer)

    @cached_property
    def plain(self) -> Tensor:
        """The logits without hooks."""
        return self.logits([])

    def logits(self, hooks: list[Hook], **options: Any) -> Tensor:
        """The model's logits on the text under hooks, all of which must fire."""
        model = self.reading.model
        with torch.no_grad(), evaluating(model), applied(model, hooks):
            logits: Tensor = model(self.tokens, **options)
        return logits

    def metric(self, hooks: list[Hook]) -> Tensor:
        """The mean of ``_metric`` under hooks."""
        return _metric(self.logits(hooks), self.tokens).mean()

    def held(self, layer: int, names: tuple[str, ...], hooks: Sequence[Hook] = ()) -> list[Tensor]:
        """What fired at hooks of a layer's attention, under other hooks."""
        seen: dict[str, Tensor] = {}
        self.logits([*hooks, *((f"blocks.{layer}.attn.{name}", partial(_keep, seen, name)) for name in names)])
        return [seen[name] for name in names]

    @cached_property
    def plain_in_parts(self) -> Tensor:
        """The logits without hooks, token by token."""
        return _token_by_token(self, [])

    @cached_property
    def padded(self) -> dict[str, tuple[Trial, Tensor, list[Trial]]]:
        """By side of the padding: a batch of two, the second without its last third and padded to the length of the
        first; its attention mask; and each text alone."""
        found = {}
        short, fill = self.tokens.shape[1] * 2 // 3, padding_id(self.reading.model)
        for side, padding in (("left", slice(None, -short)), ("right", slice(short, None))):
            tokens = self.tokens[:2].clone()
            tokens[1] = tokens[1].roll(-short) if side == "left" else tokens[1]
            mask = torch.ones_like(tokens)
            tokens[1, padding], mask[1, padding] = 0 if fill is None else fill, 0
            texts = [Trial(self.reading, row[real][None]) for row, real in zip(tokens, mask.bool(), strict=True)]
            found[side] = Trial(self.reading, tokens), mask, texts
        return found


def random_tokens(model: Any, length: int, seed: int, batch: int = 2) -> Int[Tensor, "batch pos"]:
    """Random tokens of the model's vocabulary, special ones left out where a tokenizer names them."""
    special = set(getattr(getattr(model, "tokenizer", None), "all_special_ids", None) or ())
    special |= {padding_id(model)} - {None}
    plain = torch.tensor([t for t in range(model.cfg.d_vocab) if t not in special])
    drawn = torch.randint(len(plain), (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens: Tensor = plain[drawn].to(device_of(model))
    return tokens


def _laws(tool: str, trials: dict[str, Trial]) -> Iterator[tuple[str, Iterator[Law]]]:
    """The laws of a tool, text by text."""
    for text, trial in trials.items():
        yield text, TOOLS[tool](trial)
    short = next(iter(trials.values()))
    if tool == "additivity":
        yield "padded", _padded_table(short)
    if tool in INTERVENTIONS:
        yield "padded", _padded_logits(short, INTERVENTIONS[tool].changes)
        yield "KV cache", _cached_logits(short, INTERVENTIONS[tool].changes)


def _verdict(laws: Iterator[Law], tolerance: float) -> dict[str, Any]:
    """Try a tool's laws; a ValueError is its refusal."""
    worst, reason = 0.0, ""
    try:
        for what, error in laws:
            if not error <= worst:  # NaN is worse than anything
                worst, reason = error, what
    except ValueError as error:
        return {"verdict": "refused", "error": float("nan"), "reason": " ".join(str(error).split())}
    wrong = not worst <= tolerance
    return {"verdict": "wrong" if wrong else "works", "error": worst, "reason": reason if wrong else ""}


# --- comparisons ------------------------------------------------------------------------------------------------------


def _gap(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest expected number."""
    a, b = (torch.as_tensor(x).double().cpu() for x in (got, expected))
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def _effect(changed: Tensor, plain: Tensor) -> float:
    """0 if anything has changed, inf if nothing has."""
    return float("inf") if torch.equal(changed, plain) else 0.0


def _metric(logits: Tensor, tokens: Tensor) -> Tensor:
    """A number per text in which every logit counts, each by another weight; about as large as a logit."""
    weights = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(5)).to(logits)
    total = (logits.detach() * weights).double().sum((1, 2))
    return torch.div(total, weights.numel() ** 0.5)


# --- tables -----------------------------------------------------------------------------------------------------------


def _additivity(trial: Trial) -> Iterator[Law]:
    table = additivity(trial.reading, trial.tokens, progress=False)
    for spec in trial.reading.attention:
        scores, pattern = _scores(trial, spec.layer)
        i, j = (pattern > 0).flatten(0, 1).any(0).nonzero(as_tuple=True)
        y = scores[..., i, j].double().flatten(0, 1).T
        rows = table.query(f"layer == {spec.layer}").sort_values(["batch", "head"])
        yield "r2 is that of dense least squares", _gap(rows["r2"].tolist(), _dense_r2(y, i, j))


def _dense_r2(y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """r² of a least-squares fit with a column for every distance, query and key."""
    ones = torch.eye(2 * int(max(i.max(), j.max())) + 1, dtype=torch.float64, device=y.device)
    columns = torch.cat([ones[i - j], ones[i], ones[j]], 1)
    y = y - y.mean(0)
    left = y - columns @ (torch.linalg.pinv(columns) @ y)
    r2: Tensor = 1 - left.var(0) / y.var(0)
    return r2.cpu()


def _padded_table(trial: Trial) -> Iterator[Law]:
    for side, (batch, mask, texts) in trial.padded.items():
        together = additivity(trial.reading, batch.tokens, attention_mask=mask, progress=False)
        for n, text in enumerate(texts):
            alone = additivity(trial.reading, text.tokens, progress=False).select_dtypes("number").drop(columns="batch")
            rows = together.loc[together["batch"] == n, alone.columns]
            error = max(_gap(rows[name].tolist(), alone[name].tolist()) for name in alone)
            yield f"a text in a batch padded on the {side}", error


def _capture(trial: Trial) -> Iterator[Law]:
    places = torch.arange(trial.tokens.shape[1], device=trial.tokens.device)
    for layer in capture(trial.reading, trial.tokens):
        inside = layer.spec.mask(len(places), places.device)
        scores = layer.spec.score(layer.q_rot, layer.k_rot)
        yield "scores follow from rotated queries and keys", _gap(scores[..., inside], layer.scores[..., inside])


def _controlled_distance(trial: Trial) -> Iterator[Law]:
    table = controlled_distance(trial.reading, trial.tokens, progress=False)
    if trial.tokens.numel() > 32:
        return  # brute force takes the square of the number of tokens
    for layer in capture(trial.reading, trial.tokens, layers=table["layer"].unique().tolist()):
        spec = replace(layer.spec, soft_cap=None)
        q, k = (x.double().flatten(0, 1)[None] for x in (layer.q, layer.k))  # every query with every key of all texts
        ones = torch.ones(q.shape[1], device=q.device)
        keys = spec.rotated(k, 0 * ones)
        each = [spec.score(spec.rotated(q, d * ones), keys) for d in range(trial.tokens.shape[1])]
        variance = torch.stack(each).movedim(2, 0).flatten(1).var(1, correction=0)
        rows = table.query(f"layer == {layer.layer}")
        yield "the variance is that of all scores at all distances", _gap(rows["total"].tolist(), variance.cpu())


def _head_ablation(trial: Trial) -> Iterator[Law]:
    for spec in trial.reading.attention:
        table = head_ablation(trial.reading, trial.tokens, _metric, **_one_head(trial, spec.layer))
        zeros = trial.metric([_zero_head(trial, spec.layer)])
        yield "the value is that without the head", _gap(table["value"][0], zeros)


def _head_patching(trial: Trial) -> Iterator[Law]:
    layer = trial.reading.attention[-1].layer
    other = Trial(trial.reading, trial.tokens.flip(1))
    z, pattern = trial.held(layer, ("hook_z", "hook_pattern"))
    patch_z: list[Hook] = [(f"blocks.{layer}.attn.hook_z", partial(_set_head, trial.head, 2, z))]
    for activation, hooks in (("z", patch_z), ("pattern", _attend(trial, layer, pattern))):
        options = _one_head(trial, layer) | {"activation": activation}
        table = head_patching(trial.reading, other.tokens, trial.tokens, _metric, **options)
        yield f"{activation} of another text, put in by hand", _gap(table["value"][0], other.metric(hooks))
        yield f"its own {activation} changes nothing", _gap(trial.logits(hooks), trial.plain)


def _position_patching(trial: Trial) -> Iterator[Law]:
    """Before the first layer that rotates nothing depends on positions: to patch in the vectors of the real positions
    there is to leave the layer out of the intervention."""
    order = torch.arange(trial.tokens.shape[1]).flip(0)
    everywhere = swap_positions(trial.reading, order)  # refuses what position_patching refuses
    first, *behind = [spec.layer for spec in trial.reading.attention if spec.rotary is not None]
    rest = swap_positions(trial.reading, order, layers=behind) if behind else []
    options: dict[str, Any] = {"what": "layer", "layers": [first], "progress": False}
    table = position_patching(trial.reading, trial.tokens, order, _metric, **options)
    yield "a layer left alone", _gap(table["value"][0], trial.metric(rest))
    yield "other positions", _gap(table["corrupted"][0], trial.metric(everywhere))


def _component_patching(trial: Trial) -> Iterator[Law]:
    layer, source = trial.reading.attention[-1].layer, trial.tokens.flip(1)
    components: list[MovedComponent] = ["mean", "distance", "query", "key", "residual"]
    whole = component_patching(
        trial.reading, trial.tokens, components, source=source, metric=_metric, **_one_head(trial, layer)
    )
    (pattern,) = Trial(trial.reading, source).held(layer, ("hook_pattern",))
    by_hand = trial.metric(_attend(trial, layer, pattern))
    yield "all components are another text's pattern", _gap(whole["value"][0], by_hand)
    if trial.reading.specs(layer)[0].problem is None:
        hooks = patch_scores(trial.reading, layer, _scores(trial, layer)[0])
        yield "its own scores change nothing", _gap(trial.logits(hooks), trial.plain)


def _one_head(trial: Trial, layer: int) -> dict[str, Any]:
    return {"layers": [layer], "heads": [trial.head], "progress": False}


# --- interventions ----------------------------------------------------------------------------------------------------


class Intervention(NamedTuple):
    """Hooks on a trial that must change the logits; that must change nothing; that do the first by other means."""

    changes: Callable[[Trial], list[Hook]]
    nothing: Callable[[Trial], list[Hook]] | None = None
    twice: Callable[[Trial], list[Hook]] | None = None


def _at_median(trial: Trial) -> list[Hook]:
    frequencies = trial.reading.specs(trial.layer)[0].require_rotary("limit_frequencies").frequencies
    high = float(frequencies.median()) if len(frequencies) > 1 else 0.0  # of a single one, none
    return limit_frequencies(trial.reading, high=high)


def _all_at_three(trial: Trial) -> list[Hook]:
    shape = (trial.reading.attention[0].n_heads, *2 * trial.tokens.shape[1:])
    return remap_distance(trial.reading, torch.full(shape, 3.0))


def _fitted_by_hand(trial: Trial) -> list[Hook]:
    """The additive attention nearest to a pattern; what goes to a sink beside the keys still does."""
    (pattern,) = trial.held(trial.layer, ("hook_pattern",))
    to_keys = pattern.double().sum(-1, keepdim=True)
    inside = trial.reading.specs(trial.layer)[0].mask(pattern.shape[-1], pattern.device)
    fit = fit_attention(pattern=pattern / to_keys, mask=inside)
    return _attend(trial, trial.layer, (fit.pattern() * to_keys).to(pattern.dtype))


INTERVENTIONS: dict[str, Intervention] = {
    "swap_positions": Intervention(
        lambda t: swap_positions(t.reading, lambda index: 2 * index),
        lambda t: swap_positions(t.reading, lambda index: index + 7),
        lambda t: remap_distance(t.reading, lambda d: 2 * d),
    ),
    "dummy_distance": Intervention(lambda t: dummy_distance(t.reading, 3), twice=_all_at_three),
    "remap_distance": Intervention(
        lambda t: remap_distance(t.reading, lambda d: d.clamp(max=3)),
        lambda t: remap_distance(t.reading, lambda d: d, heads=[t.head]),
    ),
    "limit_frequencies": Intervention(_at_median, lambda t: limit_frequencies(t.reading, high=1e9)),
    "phase_noise": Intervention(lambda t: phase_noise(t.reading, 0.5), lambda t: phase_noise(t.reading, 0.0)),
    "position_interpolation": Intervention(
        lambda t: position_interpolation(t.reading, 2),
        lambda t: position_interpolation(t.reading, 1),
        lambda t: swap_positions(t.reading, lambda index: index / 2),
    ),
    "lambda_mask": Intervention(
        lambda t: lambda_mask(t.reading, 1, 4, 4), lambda t: lambda_mask(t.reading, 1, 10**6, 10**6)
    ),
    "ablate_heads": Intervention(
        lambda t: ablate_heads(t.reading, [(t.layer, t.head)]), twice=lambda t: [_zero_head(t, t.layer)]
    ),
    "drop_component": Intervention(lambda t: drop_component(t.reading, "distance")),
    "substitute_additive": Intervention(
        lambda t: substitute_additive(t.reading),
        lambda t: substitute_additive(t.reading, ("distance", "query", "key", "residual")),
    ),
    "substitute_attention": Intervention(
        lambda t: substitute_attention(t.reading, "additive", heads=[(t.layer, t.head)]),
        lambda t: substitute_attention(t.reading, "untouched"),
        _fitted_by_hand,
    ),
}


def _intervention(of: Intervention, trial: Trial) -> Iterator[Law]:
    if of.nothing:
        yield "what should change nothing", _gap(trial.logits(of.nothing(trial)), trial.plain)
    changed = trial.logits(of.changes(trial))
    yield "what should change something", _effect(changed, trial.plain)
    if of.twice:
        yield "two ways to the same", _gap(trial.logits(of.twice(trial)), changed)


def _some_heads(trial: Trial) -> Iterator[Law]:
    hooks = dummy_distance(trial.reading, 3, layers=[trial.layer], heads=[trial.head])
    (spec,) = trial.reading.specs(trial.layer)
    name, axis = ("hook_pattern", 1) if spec.scores_editable else ("hook_z", 2)  # some norm z over all heads
    none: list[Hook] = []
    before, after = (trial.held(trial.layer, (name,), some)[0].movedim(axis, 0) for some in (none, hooks))
    others = [h for h in range(spec.n_heads) if h != trial.head]
    if others:
        yield "the other heads stay", _gap(after[others], before[others])
    yield "the head changes", _effect(after[trial.head], before[trial.head])


def _patch_vectors(trial: Trial) -> Iterator[Law]:
    own = next(iter(capture(trial.reading, trial.tokens, layers=[trial.layer])))
    hooks = patch_vectors(trial.reading, trial.layer, own.q_rot, own.k_rot)
    yield "its own rotated vectors change nothing", _gap(trial.logits(hooks), trial.plain)


def _padded_logits(trial: Trial, hooks: Callable[[Trial], list[Hook]]) -> Iterator[Law]:
    edits = hooks(trial)
    parameters = inspect.signature(trial.reading.model.forward).parameters.values()
    if not any(p.name == "attention_mask" or p.kind == p.VAR_KEYWORD for p in parameters):
        raise ValueError(f"{type(trial.reading.model).__name__} takes no attention_mask")
    for side, (batch, mask, texts) in trial.padded.items():
        plain, together = (batch.logits(some, attention_mask=mask) for some in ([], edits))
        for n, (text, real) in enumerate(zip(texts, mask.bool(), strict=True)):
            if _gap(plain[n][real], text.plain[0]) > TOLERANCE[plain.dtype]:
                raise ValueError(f"the model itself gives other logits in a batch padded on the {side}")
            yield f"a text in a batch padded on the {side}", _gap(together[n][real], text.logits(edits)[0])


def _cached_logits(trial: Trial, hooks: Callable[[Trial], list[Hook]]) -> Iterator[Law]:
    edits = hooks(trial)
    if _gap(trial.plain_in_parts, trial.plain) > TOLERANCE[trial.plain.dtype]:
        raise ValueError("the model itself gives other logits with a KV cache")
    yield "token by token with a KV cache", _gap(_token_by_token(trial, edits), trial.logits(edits))


def _token_by_token(trial: Trial, hooks: list[Hook]) -> Tensor:
    """The logits of the first half in one pass, then of one token after the other, with a KV cache."""
    n = trial.tokens.shape[1] // 2
    cache, parts = empty_cache(trial.reading.model, trial.tokens), []
    for part in (trial.tokens[:, :n], *trial.tokens[:, n:].split(1, 1)):
        parts.append(Trial(trial.reading, part).logits(hooks, **with_mask(cache, part)))
    return torch.cat(parts, 1)


# --- what the laws compare with ---------------------------------------------------------------------------------------


def _scores(trial: Trial, layer: int) -> tuple[Tensor, Tensor]:
    """Scores and pattern as the model shows them; scores of some bridges are the pattern, then those of `capture`."""
    scores, pattern = trial.held(layer, ("hook_attn_scores", "hook_pattern"))
    if torch.equal(scores, pattern):
        scores = next(iter(capture(trial.reading, trial.tokens, layers=[layer]))).scores
    return scores, pattern


def _keep(seen: dict[str, Tensor], name: str, x: Tensor, hook: Any) -> None:
    seen[name] = x.clone()


def _set_head(head: int, axis: int, new: Tensor | None, x: Tensor, hook: Any) -> Tensor:
    """Replace one head along an axis by that of another tensor, or by zeros."""
    x = x.clone()
    x.select(axis, head).copy_(x.new_zeros(()) if new is None else new.select(axis, head))
    return x


def _zero_head(trial: Trial, layer: int) -> Hook:
    return f"blocks.{layer}.attn.hook_z", partial(_set_head, trial.head, 2, None)


def _attend(trial: Trial, layer: int, pattern: Tensor) -> list[Hook]:
    """Hooks under which one head gathers its values by this pattern: at ``hook_pattern`` if the model uses an edited
    one, else at ``hook_z``."""
    attention, seen = f"blocks.{layer}.attn", dict[str, Tensor]()
    if trial.reading.specs(layer)[0].scores_editable:
        return [(f"{attention}.hook_pattern", partial(_set_head, trial.head, 1, pattern))]

    def gather(z: Tensor, hook: Any) -> Tensor:
        v = seen["v"] if seen["v"].shape[1] == z.shape[1] else seen["v"].transpose(1, 2)  # by heads first
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
        by_head = z.flatten(2).unflatten(2, (pattern.shape[1], -1)).clone()
        by_head[:, :, trial.head] = torch.einsum("bij,bjd->bid", pattern[:, trial.head], v[:, :, trial.head])
        result: Tensor = by_head.reshape(z.shape)
        return result

    return [(f"{attention}.hook_v", partial(_keep, seen, "v")), (f"{attention}.hook_z", gather)]


TOOLS: dict[str, Callable[[Trial], Iterator[Law]]] = {
    "additivity": _additivity,
    "capture": _capture,
    "controlled_distance": _controlled_distance,
    **{name: partial(_intervention, intervention) for name, intervention in INTERVENTIONS.items()},
    "single heads": _some_heads,
    "patch_vectors": _patch_vectors,
    "head_ablation": _head_ablation,
    "head_patching": _head_patching,
    "position_patching": _position_patching,
    "component_patching": _component_patching,
}
"""Every tool that is checked, and its laws on a text without padding."""
