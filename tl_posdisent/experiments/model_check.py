"""Check on one model that every tool does what it says, on short, long and padded texts and with a KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.attention.attention_fit import fit_attention
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.frequencies import limit_frequencies
from tl_posdisent.hooks.length_extension import lambda_mask, position_interpolation
from tl_posdisent.hooks.patch import MovedPart, patch_scores, patch_vectors
from tl_posdisent.hooks.phase_noise import phase_noise
from tl_posdisent.hooks.positions import dummy_distance, remap_distance, swap_positions
from tl_posdisent.hooks.score_components import drop_component
from tl_posdisent.hooks.substitute import substitute_additive
from tl_posdisent.hooks.substitute_attention import substitute_attention
from tl_posdisent.models.capture import capture
from tl_posdisent.models.chunked_scores import empty_cache
from tl_posdisent.models.reading.forward import Hook, device_of, evaluating, padding_id
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.utils.validation import check_choice, check_integer, check_seed

from .attention_scores.additivity import additivity
from .attention_scores.controlled_distance import controlled_distance
from .causal.head_ablation import head_ablation
from .causal.head_patching import head_patching
from .causal.position_patching import component_patching, position_patching

TOLERANCE = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative error that rounding explains, by the dtype of the model. Rotation tables are float32 at best."""

Law = tuple[str, float]
"""What must hold, and by how much it fails, relative to the largest number that is compared; inf for no effect."""


@dataclass(frozen=True)
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

    def logits(self, hooks: list[Hook] | None = None, **options: Any) -> Tensor:
        """The model's logits on the text under hooks, all of which must fire."""
        model = self.reading.model
        with torch.no_grad(), evaluating(model), applied(model, hooks or []):
            logits: Tensor = model(self.tokens, **options)
        return logits

    def held(self, layer: int, names: tuple[str, ...]) -> list[Tensor]:
        """What fired at hooks of a layer's attention."""
        seen: dict[str, Tensor] = {}
        self.logits([(f"blocks.{layer}.attn.{name}", partial(_keep, seen, name)) for name in names])
        return [seen[name] for name in names]


def check_model(
    model: Any,
    *,
    tools: Sequence[str] | None = None,
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
    chosen = list(TOOLS) if tools is None else list(tools)
    for tool in chosen:
        check_choice("tools", tool, TOOLS)
    sizes = [lengths] if isinstance(lengths, int) else list(lengths)
    for length in sizes:
        check_integer("lengths", length, 4)
    reading = read_model(model)
    texts = {f"{length} tokens": random_tokens(reading.model, length, seed) for length in sizes}
    tolerance = max(TOLERANCE[p.dtype] for p in reading.model.parameters() if p.dtype in TOLERANCE)
    rows: list[dict[str, Any]] = []
    for tool in tqdm(chosen, desc="check_model", disable=not progress):
        for text, laws in _trials(tool, reading, texts):
            rows.append({"tool": tool, "text": text, **_verdict(laws, tolerance)})
            if rows[-1]["verdict"] == "refused" and text in texts:
                break  # padded or in parts it would be refused again
    return pd.DataFrame(rows, columns=["tool", "text", "verdict", "error", "reason"])


def _trials(tool: str, reading: ModelReading, texts: dict[str, Tensor]) -> Iterator[tuple[str, Iterator[Law]]]:
    """The laws of a tool, text by text."""
    for text, tokens in texts.items():
        yield text, TOOLS[tool](Trial(reading, tokens))
    short = Trial(reading, next(iter(texts.values())))
    if tool in TABLES:
        yield "padded", _padded_table(short, TABLES[tool])
    if tool in INTERVENTIONS:
        yield "padded", _padded_logits(short, INTERVENTIONS[tool])
        yield "KV cache", _cached_logits(short, INTERVENTIONS[tool])


def random_tokens(model: Any, length: int, seed: int, batch: int = 2) -> Int[Tensor, "batch pos"]:
    """Random tokens of the model's vocabulary, special ones left out where a tokenizer names them."""
    special = set(getattr(getattr(model, "tokenizer", None), "all_special_ids", None) or ())
    special |= {padding_id(model)} - {None}
    plain = torch.tensor([t for t in range(model.cfg.d_vocab) if t not in special])
    drawn = torch.randint(len(plain), (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens: Tensor = plain[drawn].to(device_of(model))
    return tokens


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


def _capture(trial: Trial) -> Iterator[Law]:
    places = torch.arange(trial.tokens.shape[1], device=trial.tokens.device)
    for layer in capture(trial.reading, trial.tokens):
        inside = layer.spec.mask(len(places), places.device)
        scores = layer.spec.score(layer.q_rot, layer.k_rot)
        yield "scores follow from rotated queries and keys", _gap(scores[..., inside], layer.scores[..., inside])


def _controlled_distance(trial: Trial) -> Iterator[Law]:
    table = controlled_distance(trial.reading, trial.tokens, progress=False)
    for layer in capture(trial.reading, trial.tokens, layers=table["layer"].unique().tolist()):
        spec = replace(layer.spec, soft_cap=None)
        q, k = (x.double().flatten(0, 1)[None] for x in (layer.q, layer.k))  # every query with every key of all texts
        q, k = q[:, :32], k[:, :32]
        if q.shape[1] < layer.q.shape[0] * layer.q.shape[1]:
            return  # brute force takes the square of the number of tokens
        keys = spec.rotated(k, torch.zeros(k.shape[1], device=k.device))
        there = torch.ones(q.shape[1], device=q.device)
        each = [spec.score(spec.rotated(q, d * there), keys) for d in range(trial.tokens.shape[1])]
        variance = torch.stack(each).movedim(2, 0).flatten(1).var(1, correction=0)
        rows = table.query(f"layer == {layer.layer}")
        yield "the variance is that of all scores at all distances", _gap(rows["total"].tolist(), variance.cpu())


def _head_ablation(trial: Trial) -> Iterator[Law]:
    for spec in trial.reading.attention:
        layer, tokens = spec.layer, trial.tokens
        zeros = trial.logits([(f"blocks.{layer}.attn.hook_z", _zeros(trial.head))])
        table = head_ablation(trial.reading, tokens, _metric, layers=[layer], heads=[trial.head], progress=False)
        yield "the value is that without the head", _gap(table["value"][0], _metric(zeros, tokens).mean())


def _head_patching(trial: Trial) -> Iterator[Law]:
    layer, tokens = trial.reading.attention[-1].layer, trial.tokens
    other = Trial(trial.reading, tokens.flip(1))
    z, pattern = trial.held(layer, ("hook_z", "hook_pattern"))
    by_hand = {"z": [(f"blocks.{layer}.attn.hook_z", _put(trial.head, z))], "pattern": _attend(trial, layer, pattern)}
    for activation, hooks in by_hand.items():
        table = head_patching(
            trial.reading, tokens, other.tokens, _metric, layers=[layer], heads=[trial.head], progress=False,
            activation="z" if activation == "z" else "pattern",
        )  # fmt: skip
        expected = _metric(other.logits(hooks), other.tokens).mean()
        yield f"{activation} of another text, put in by hand", _gap(table["value"][0], expected)
        yield f"its own {activation} changes nothing", _gap(trial.logits(hooks), trial.logits())


def _position_patching(trial: Trial) -> Iterator[Law]:
    """Before the first layer that rotates nothing depends on positions: to patch in the vectors of the real positions
    there is to leave the layer out of the intervention."""
    model, tokens = trial.reading, trial.tokens
    order = torch.arange(tokens.shape[1]).flip(0)
    everywhere = swap_positions(model, order)  # refuses what position_patching refuses
    first, *behind = [spec.layer for spec in trial.reading.attention if spec.rotary is not None]
    rest = swap_positions(model, order, layers=behind) if behind else []
    table = position_patching(model, tokens, order, _metric, what="layer", layers=[first], progress=False)
    yield "a layer left alone", _gap(table["value"][0], _metric(trial.logits(rest), tokens).mean())
    yield "other positions", _gap(table["corrupted"][0], _metric(trial.logits(everywhere), tokens).mean())


def _component_patching(trial: Trial) -> Iterator[Law]:
    tokens, layer = trial.tokens, trial.reading.attention[-1].layer
    other = Trial(trial.reading, tokens.flip(1))
    parts: list[MovedPart] = ["mean", "distance", "query", "key", "residual"]
    options: dict[str, Any] = {"metric": _metric, "layers": [layer], "heads": [trial.head], "progress": False}
    whole = component_patching(trial.reading, tokens, parts, from_tokens=other.tokens, **options)
    (pattern,) = other.held(layer, ("hook_pattern",))
    by_hand = _metric(trial.logits(_attend(trial, layer, pattern)), tokens).mean()
    yield "all parts are another text's pattern", _gap(whole["value"][0], by_hand)
    if trial.reading.specs(layer)[0].problem is None:
        hooks = patch_scores(trial.reading, layer, _scores(trial, layer)[0])
        yield "its own scores change nothing", _gap(trial.logits(hooks), trial.logits())


TABLES: dict[str, Callable[..., pd.DataFrame]] = {"additivity": additivity}
"""Tools with a row per text, which is compared between a padded batch and the text alone."""


def _padded_table(trial: Trial, tool: Callable[..., pd.DataFrame]) -> Iterator[Law]:
    for side in ("left", "right"):
        tokens, mask = _padded(trial, side)
        together = tool(trial.reading, tokens, attention_mask=mask, progress=False)
        for n, real in enumerate(mask.bool()):
            alone = tool(trial.reading, tokens[n][real][None], progress=False)
            rows = together[together["batch"] == n]
            yield f"a text in a batch padded on the {side}", _table_gap(rows, alone, {"batch"})


# --- interventions ----------------------------------------------------------------------------------------------------


def _all_scores(trial: Trial) -> list[Hook]:
    return substitute_additive(trial.reading, ("distance", "query", "key", "residual"))


def _at_median(trial: Trial) -> list[Hook]:
    frequencies = trial.reading.specs(trial.layer)[0].require_rotary("limit_frequencies").frequencies
    high = float(frequencies.median()) if len(frequencies) > 1 else 0.0  # of a single one, none
    return limit_frequencies(trial.reading, high=high)


NOTHING: dict[str, Callable[[Trial], list[Hook]]] = {
    "swap_positions": lambda t: swap_positions(t.reading, lambda index: index + 7),
    "remap_distance": lambda t: remap_distance(t.reading, lambda d: d, heads=[t.head]),
    "limit_frequencies": lambda t: limit_frequencies(t.reading, high=1e9),
    "phase_noise": lambda t: phase_noise(t.reading, 0.0),
    "position_interpolation": lambda t: position_interpolation(t.reading, 1),
    "lambda_mask": lambda t: lambda_mask(t.reading, 1, 10**6, 10**6),
    "substitute_additive": _all_scores,
    "substitute_attention": lambda t: substitute_attention(t.reading, "untouched"),
}
"""Interventions that must leave the logits as they are."""

INTERVENTIONS: dict[str, Callable[[Trial], list[Hook]]] = {
    "swap_positions": lambda t: swap_positions(t.reading, lambda index: 2 * index),
    "dummy_distance": lambda t: dummy_distance(t.reading, 3),
    "remap_distance": lambda t: remap_distance(t.reading, lambda d: d.clamp(max=3)),
    "limit_frequencies": _at_median,
    "phase_noise": lambda t: phase_noise(t.reading, 0.5),
    "position_interpolation": lambda t: position_interpolation(t.reading, 2),
    "lambda_mask": lambda t: lambda_mask(t.reading, 1, 4, 4),
    "ablate_heads": lambda t: ablate_heads(t.reading, [(t.layer, t.head)]),
    "drop_component": lambda t: drop_component(t.reading, "distance"),
    "substitute_additive": lambda t: substitute_additive(t.reading),
    "substitute_attention": lambda t: substitute_attention(t.reading, "additive", heads=[(t.layer, t.head)]),
}
"""Interventions that must change them."""


def _intervention(name: str) -> Callable[[Trial], Iterator[Law]]:
    def laws(trial: Trial) -> Iterator[Law]:
        plain = trial.logits()
        if name in NOTHING:
            yield "what should change nothing", _gap(trial.logits(NOTHING[name](trial)), plain)
        changed = trial.logits(INTERVENTIONS[name](trial))
        yield "what should change something", _effect(changed, plain)
        if name in TWICE:
            yield "two ways to the same", _gap(trial.logits(TWICE[name](trial)), changed)

    return laws


def _fitted_by_hand(trial: Trial) -> list[Hook]:
    """The additive attention nearest to a pattern; what goes to a sink beside the keys still does."""
    (pattern,) = trial.held(trial.layer, ("hook_pattern",))
    to_keys = pattern.double().sum(-1, keepdim=True)
    inside = trial.reading.specs(trial.layer)[0].mask(pattern.shape[-1], pattern.device)
    fit = fit_attention(pattern=pattern / to_keys, mask=inside)
    return _attend(trial, trial.layer, (fit.pattern() * to_keys).to(pattern.dtype))


TWICE: dict[str, Callable[[Trial], list[Hook]]] = {
    "swap_positions": lambda t: remap_distance(t.reading, lambda d: 2 * d),
    "dummy_distance": lambda t: remap_distance(
        t.reading, torch.full((t.reading.attention[0].n_heads, *2 * t.tokens.shape[1:]), 3.0)
    ),
    "position_interpolation": lambda t: swap_positions(t.reading, lambda index: index / 2),
    "ablate_heads": lambda t: [(f"blocks.{t.layer}.attn.hook_z", _zeros(t.head))],
    "substitute_attention": _fitted_by_hand,
}
"""The same by other means."""


def _some_heads(trial: Trial) -> Iterator[Law]:
    hooks = dummy_distance(trial.reading, 3, layers=[trial.layer], heads=[trial.head])
    (spec,) = trial.reading.specs(trial.layer)
    mixed = spec.scores_editable and not _gathers_plainly(trial, trial.layer)  # a norm over all heads, for instance
    name, axis = ("hook_pattern", 1) if mixed else ("hook_z", 2)
    seen: list[Tensor] = []
    for some in ([], hooks):
        trial.logits([*some, (f"blocks.{trial.layer}.attn.{name}", lambda x, hook: seen.append(x.clone()))])
    before, after = (x.movedim(axis, 0) for x in seen)
    others = [h for h in range(spec.n_heads) if h != trial.head]
    if others:
        yield "the other heads stay", _gap(after[others], before[others])
    yield "the head changes", _effect(after[trial.head], before[trial.head])


def _patch_vectors(trial: Trial) -> Iterator[Law]:
    own = next(iter(capture(trial.reading, trial.tokens, layers=[trial.layer])))
    hooks = patch_vectors(trial.reading, trial.layer, own.q_rot, own.k_rot)
    yield "its own rotated vectors change nothing", _gap(trial.logits(hooks), trial.logits())


def _padded_logits(trial: Trial, hooks: Callable[[Trial], list[Hook]]) -> Iterator[Law]:
    edits = hooks(trial)
    parameters = inspect.signature(trial.reading.model.forward).parameters.values()
    if not any(p.name == "attention_mask" or p.kind == p.VAR_KEYWORD for p in parameters):
        raise ValueError(f"{type(trial.reading.model).__name__} takes no attention_mask")
    for side in ("left", "right"):
        tokens, mask = _padded(trial, side)
        batch = Trial(trial.reading, tokens)
        plain, together = (batch.logits(some, attention_mask=mask) for some in (None, edits))
        for n, real in enumerate(mask.bool()):
            text = Trial(trial.reading, tokens[n][real][None])
            if _gap(plain[n][real], text.logits()[0]) > TOLERANCE[plain.dtype]:
                raise ValueError(f"the model itself gives other logits in a batch padded on the {side}")
            yield f"a text in a batch padded on the {side}", _gap(together[n][real], text.logits(edits)[0])


def _cached_logits(trial: Trial, hooks: Callable[[Trial], list[Hook]]) -> Iterator[Law]:
    edits, plain = hooks(trial), trial.logits()
    if _gap(_token_by_token(trial, []), plain) > TOLERANCE[plain.dtype]:
        raise ValueError("the model itself gives other logits with a KV cache")
    yield "token by token with a KV cache", _gap(_token_by_token(trial, edits), trial.logits(edits))


def _token_by_token(trial: Trial, hooks: list[Hook]) -> Tensor:
    """The logits of the first half in one pass, then of one token after the other, with a KV cache."""
    n = trial.tokens.shape[1] // 2
    cache, parts = empty_cache(trial.reading.model, trial.tokens), []
    for part in (trial.tokens[:, :n], *trial.tokens[:, n:].split(1, 1)):
        if "past_kv_cache" in cache:  # or HookedTransformer asks a tokenizer what padding is
            cache["attention_mask"] = torch.ones_like(part)
        parts.append(Trial(trial.reading, part).logits(hooks, **cache))
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


def _zeros(head: int) -> Callable[..., Tensor]:
    def zeros(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, head] = 0
        return z

    return zeros


def _attend(trial: Trial, layer: int, pattern: Tensor) -> list[Hook]:
    """Hooks under which one head gathers its values by this pattern: at ``hook_z``, unless values are gated, clipped or
    normalised in between and the model uses an edited pattern."""
    attention, seen = f"blocks.{layer}.attn", dict[str, Tensor]()
    if trial.reading.specs(layer)[0].scores_editable and not _gathers_plainly(trial, layer):
        return [(f"{attention}.hook_pattern", _put_head(trial.head, pattern))]

    def gather(z: Tensor, hook: Any) -> Tensor:
        by_head = z.flatten(2).unflatten(2, (pattern.shape[1], -1)).clone()
        by_head[:, :, trial.head] = _gathered(trial, pattern, seen["v"])
        result: Tensor = by_head.reshape(z.shape)
        return result

    return [(f"{attention}.hook_v", partial(_keep, seen, "v")), (f"{attention}.hook_z", gather)]


def _gathered(trial: Trial, pattern: Tensor, v: Tensor) -> Tensor:
    """What the head gathers of these values, ``[batch, pos, d_head]``."""
    v = v if v.shape[1] == trial.tokens.shape[1] else v.transpose(1, 2)  # by heads first
    v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)[:, :, trial.head]
    return torch.einsum("bij,bjd->bid", pattern[:, trial.head], v)


def _gathers_plainly(trial: Trial, layer: int) -> bool:
    """Whether ``hook_z`` is the pattern times ``hook_v``."""
    z, pattern, v = trial.held(layer, ("hook_z", "hook_pattern", "hook_v"))
    by_head = z.flatten(2).unflatten(2, (pattern.shape[1], -1))[:, :, trial.head]
    return _gap(by_head, _gathered(trial, pattern, v)) <= TOLERANCE[z.dtype]


def _put_head(head: int, pattern: Tensor) -> Callable[..., Tensor]:
    def put(own: Tensor, hook: Any) -> Tensor:
        own = own.clone()
        own[:, head] = pattern[:, head]
        return own

    return put


def _padded(trial: Trial, side: str) -> tuple[Tensor, Tensor]:
    """The text as a batch of two, the second without its last third and padded to the length of the first."""
    tokens, short = trial.tokens[:2].clone(), trial.tokens.shape[1] * 2 // 3
    fill = padding_id(trial.reading.model)
    mask = torch.ones_like(tokens)
    padding = slice(None, -short) if side == "left" else slice(short, None)
    if side == "left":
        tokens[1] = tokens[1].roll(-short)
    tokens[1, padding], mask[1, padding] = 0 if fill is None else fill, 0
    return tokens, mask


def _table_gap(got: pd.DataFrame, expected: pd.DataFrame, without: set[str]) -> float:
    """Largest relative difference of two tables in any column of numbers."""
    columns = [c for c in expected.select_dtypes("number") if c not in without]
    return max(_gap(got[c].tolist(), expected[c].tolist()) for c in columns)


def _put(head: int, new: Tensor) -> Callable[..., Tensor]:
    def put(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, head] = new[:, :, head]
        return z

    return put


TOOLS: dict[str, Callable[[Trial], Iterator[Law]]] = {
    "additivity": _additivity,
    "capture": _capture,
    "controlled_distance": _controlled_distance,
    **{name: _intervention(name) for name in INTERVENTIONS},
    "single heads": _some_heads,
    "patch_vectors": _patch_vectors,
    "head_ablation": _head_ablation,
    "head_patching": _head_patching,
    "position_patching": _position_patching,
    "component_patching": _component_patching,
}
"""Every tool that is checked, and its laws on a text without padding."""
