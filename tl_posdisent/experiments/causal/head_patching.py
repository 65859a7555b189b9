"""Activation patching of heads, by TransformerLens's own functions where these are correct."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, any_heads
from tl_posdisent.hooks.planning.planner import replace_scores
from tl_posdisent.models.reading.forward import Hook, evaluating, hook_name, run
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_choice

from .metrics import Metric, as_table, check_apart, check_metric, measure, read_pair, value_of

Activation = Literal["z", "q", "k", "v", "pattern"]


def head_patching(
    model: Any,
    clean_tokens: Tokens,
    corrupted_tokens: Tokens,
    metric: Metric,
    *,
    attention_mask: Tensor | None = None,
    activation: Activation = "z",
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch the activation of each head at all positions from a run on one text into a run on another.

    This is ``transformer_lens.patching.generic_activation_patch`` with one table for every model; the values are those
    of ``get_act_patch_attn_head_{out,q,k,v,pattern}_all_pos``, where these are correct. Their limits (in 3.9 and 4.3,
    without an error):

    * Grouped heads: keys and values come as a column per key head, and as columns of zeros in the ``..._every``
      functions. Here each query head has a row, with the effect of the key head that it reads. Of a HookedTransformer
      that repeats keys for every head (``ungroup_grouped_query_attention``) they patch only as many as there are key
      heads; here all are.
    * Bridges that leave attention to Hugging Face (GPT-J, GPT-Neo, OPT): a patched pattern is discarded, and every
      effect is 0. Here the attention's result is recomputed from the pattern.
    * Multi-head latent attention (DeepSeek): its hooks are not laid out by heads, and positions are patched in their
      stead. Here that is an error.

    One forward pass for each row (one per key head for keys and values), and for each layer a part of one. The
    activations of one layer are held meanwhile.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``. Dropout is off meanwhile.
        clean_tokens, corrupted_tokens: ids ``[batch, pos]`` of the same shape, or texts that have the same lengths:
            the run that is patched from, and the one that is patched.
        attention_mask: 1 at tokens, 0 at padding, for padded ids, the same for both. Each text is run without its
            padding.
        metric: a function of ``(logits [batch, pos, vocab], clean_tokens)`` that returns a number or one for each
            text, of which the mean counts. At padding its logits are NaN.
        activation: ``"z"`` (a head's result), ``"q"``, ``"k"``, ``"v"`` (before rotation and norm) or ``"pattern"``.
        layers: default all.
        heads: query heads, default all: of each of these layers, or pairs ``(layer, head)``.
        progress: show a bar.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``clean``, ``corrupted`` and ``value``, the metric of the two
        runs and of the patched one; ``effect``, ``(value - corrupted) / (clean - corrupted)``.

    Raises:
        ValueError: tokens of different shape, or with the same metric; layers or heads out of range; an unknown
            activation, or one that the model does not show by heads; a metric that returns anything else.

    Example:
        >>> from tl_posdisent import demo_tokens, head_patching, load_demo_model
        >>> model, clean = load_demo_model(), demo_tokens(length=32)
        >>> corrupted = clean.clone()
        >>> corrupted[0, 20] = 5  # another token
        >>> def log_p(logits, tokens):
        ...     return logits[:, 20].log_softmax(-1)[:, tokens[0, 21]]
        >>> table = head_patching(model, clean, corrupted, log_p, layers=[0], progress=False)
        >>> list(table.columns)
        ['layer', 'head', 'clean', 'corrupted', 'value', 'effect']
    """
    check_choice("activation", activation, get_args(Activation))
    check_metric(metric)
    reading = read_model(model, layers)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    clean = read_texts(model, clean_tokens, attention_mask)
    names = ("corrupted_tokens", "clean_tokens")
    corrupted = read_pair(model, clean, names, corrupted_tokens, attention_mask)
    rows: list[tuple[int, int, float]] = []
    n_rows = sum(len(some) for _, some in chosen)
    untouched: list[list[Hook]] = [[] for _ in clean.groups]
    with evaluating(model), tqdm(total=n_rows, desc="patches", disable=not progress) as bar:
        measured = {
            "clean": measure(model, clean, untouched, metric, clean),
            "corrupted": measure(model, corrupted, untouched, metric, clean),
        }
        check_apart(model, measured, "clean_tokens")
        for spec, some in chosen:
            held = [_held(model, group.tokens, spec, activation) for group in clean.groups]
            for there, members in _at_hook(spec, some, activation).items():
                if activation == "pattern" and not spec.scores_editable:
                    hooks = [_attend_by(spec, there, theirs) for theirs in held]
                    value = measure(model, corrupted, hooks, metric, clean)
                else:
                    outputs = [
                        _by_transformer_lens(model, group.tokens, theirs, (spec.layer, there), activation)
                        for group, theirs in zip(corrupted.groups, held, strict=True)
                    ]
                    value = value_of(metric, outputs, clean)
                rows += [(spec.layer, head, value) for head in members]
                bar.update(len(members))
    return reading.note(as_table(rows, measured))


def _at_hook(spec: AttentionSpec, heads: list[int], activation: Activation) -> dict[int, list[int]]:
    """The head's number at the hook, and the query heads that share it."""
    shared: dict[int, list[int]] = {}
    for head in heads:
        shared.setdefault(spec.key_head(head) if activation in ("k", "v") else head, []).append(head)
    return shared


def _held(
    model: Any, tokens: Int[Tensor, "batch pos"], spec: AttentionSpec, activation: Activation
) -> dict[str, Tensor]:
    """One layer's activation in a run on these tokens, by the hook's name."""
    name = hook_name(spec.layer, f"hook_{activation}")
    held: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> None:
        held[name] = x.detach().clone()

    n = spec.n_kv_heads if activation in ("k", "v") else spec.n_heads
    length = tokens.shape[1]
    if name in model.hook_dict and length == n:  # by which axes cannot be told apart
        run(model, tokens[:, :-1], [(name, keep)], stop=spec.layer + 1)
        _check_layout(spec, name, held, length - 1, n)
    if name in model.hook_dict:
        run(model, tokens, [(name, keep)], stop=spec.layer + 1)
    if length != n:
        _check_layout(spec, name, held, length, n)
    return held


def _check_layout(spec: AttentionSpec, name: str, held: dict[str, Tensor], length: int, n: int) -> None:
    """Refuse what is not laid out by heads, of which TransformerLens would patch something else."""
    shape = tuple(held[name].shape) if name in held else ()
    if shape[1:] != (n, length, length) if name.endswith("pattern") else shape[1:3] != (length, n):
        missing = f"carries a tensor of shape {shape} on {length} tokens" if shape else "does not fire"
        raise ValueError(
            f"activation must be one that the model shows by heads, but {name} of {spec.architecture} {missing}, and "
            f"there are {n} heads"
        )


def _attend_by(spec: AttentionSpec, head: int, held: dict[str, Tensor]) -> list[Hook]:
    """A head's pattern put in where the model discards edits of it: as scores of which it is the softmax."""
    (pattern,) = held.values()
    scores = pattern[:, [head]].log()
    return replace_scores(spec, [head], lambda view: scores, "head_patching")


def _by_transformer_lens(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    held: dict[str, Tensor],
    where: tuple[int, int],
    activation: Activation,
) -> Any:
    """What the model returns with one head's activation from another run."""
    from transformer_lens import patching  # takes seconds

    setter = (
        patching.layer_head_pattern_patch_setter if activation == "pattern" else patching.layer_head_vector_patch_setter
    )
    outputs: list[Any] = []

    def keep(output: Any) -> Tensor:
        outputs.append(output)
        return torch.tensor(0.0)

    index = pd.DataFrame([where], columns=["layer", "head"])
    with torch.no_grad(), _without_its_bar(patching):
        patching.generic_activation_patch(model, tokens, held, keep, setter, activation, index_df=index)
    return outputs[0]


@contextlib.contextmanager
def _without_its_bar(patching: Any) -> Iterator[None]:
    """TransformerLens's patching shows a bar for every call, which no argument switches off."""
    bar, patching.tqdm = patching.tqdm, lambda rows: rows
    try:
        yield
    finally:
        patching.tqdm = bar
