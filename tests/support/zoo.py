"""Tiny random models of every tested architecture, in both TransformerLens classes, offline.

`bridge(name)` and `hooked(name)` carry the weights of `hf_model(name)`. `test_zoo.py` compares them with `hf_logits`.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor

from .zoo_configs import ARCHITECTURES, VOCAB
from .zoo_hooked import CONVERTIBLE, build_hooked

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

TL_MAJOR = int(importlib.metadata.version("transformer-lens").split(".")[0])

# Left out of the Bridge, because the Bridge itself is wrong there:
# * `cohere` before TransformerLens 4: it pairs the rotary dimensions half-split instead of adjacent.
# Never in the table: Falcon with ALiBi (the Bridge adds the bias twice).
_WRONG_IN_BRIDGE = {"cohere"} if TL_MAJOR < 4 else set()

NAMES: tuple[str, ...] = tuple(name for name, kind in ARCHITECTURES.items() if not kind.hybrid)
HYBRID_NAMES: tuple[str, ...] = tuple(  # models that mix attention with other layers; no test takes them unasked
    name for name, kind in ARCHITECTURES.items() if kind.hybrid and hasattr(transformers, kind.config)
)
BRIDGE_NAMES: tuple[str, ...] = tuple(name for name in NAMES if name not in _WRONG_IN_BRIDGE)
# HookedTransformer left TransformerLens with version 4; then the names stay, and `hooked` skips. Left out, beside the
# architectures that TransformerLens does not convert: OLMo 2 with grouped queries, since its converter takes every head
# to have a key of its own.
_NOT_IN_HOOKED = {"olmo2-gqa"}
HOOKED_NAMES: tuple[str, ...] = tuple(
    name for name in NAMES if ARCHITECTURES[name].model in CONVERTIBLE and name not in _NOT_IN_HOOKED
)


def hf_model(name: str, attn: str = "eager", **changes: Any) -> transformers.PreTrainedModel:
    """A fresh copy of the model, in `eval` mode and float32; fresh because a Bridge changes what it wraps.

    ``changes`` are config arguments in place of the table's. The weights stay the same if their shapes do.
    """
    architecture = ARCHITECTURES[name]
    config_class = getattr(transformers, architecture.config)
    # transformers writes into the dictionaries it is given.
    config = config_class(**copy.deepcopy(architecture.arguments | changes))
    config._attn_implementation = attn  # before the model is made: Falcon chooses its attention class then
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, architecture.model)(config).float()
        randomise(model, architecture.scale, architecture.embedding)
    return model.eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, scale: float, embedding: float) -> None:
    """Draw large parameters: peaked attention, norms other than one, biases other than zero.

    At the usual initialisation of 0.02 scores are within 0.03 of zero, and a wrong rotation would pass any tolerance.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(0.3 * noise)  # a norm: near 1, or near 0 where the model adds the 1 itself (Gemma)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)  # biases, attention sinks
        elif any(word in name for word in ("embed", "wte", "wpe")) and "layernorm" not in name:
            parameter.copy_(embedding * noise)
        else:
            parameter.copy_(scale * noise)


@functools.cache
def _reference(name: str) -> transformers.PreTrainedModel:
    return hf_model(name)


def random_tokens(length: int = 12, batch: int = 2, seed: int = 0) -> Int[Tensor, "batch pos"]:
    """Draw random tokens, without the first three ids, which configs use for padding, BOS and EOS."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def hf_logits(
    name: str, tokens: Int[Tensor, "batch pos"], position_ids: Int[Tensor, "batch pos"] | None = None
) -> Float[Tensor, "batch pos vocab"]:
    """Compute the logits of a new Hugging Face model, without a bridge."""
    arguments: dict[str, Any] = {}
    if position_ids is not None:
        # Without a mask transformers takes a jump in the positions for a new document, and hides the old one.
        arguments = {"position_ids": position_ids, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        return _reference(name)(tokens, use_cache=False, **arguments).logits


def bridge(name: str, attn: str = "eager", **changes: Any) -> TransformerBridge:
    """The model of `hf_model` in a fresh `TransformerBridge`, raw: nothing folded, no compatibility mode."""
    if name in _WRONG_IN_BRIDGE:
        pytest.skip(f"TransformerBridge of TransformerLens {TL_MAJOR} computes {name} wrongly")
    return as_bridge(hf_model(name, attn, **changes))


def as_bridge(model: transformers.PreTrainedModel) -> TransformerBridge:
    """Wrap a Hugging Face model, changing it in place."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    return build_bridge_from_module(
        model, architecture=type(model).__name__, hf_config=model.config, tokenizer=None
    ).eval()


def hooked(name: str, **changes: Any) -> HookedTransformer:
    """The model as a fresh `HookedTransformer`, raw; skips the test where there is none."""
    if name not in HOOKED_NAMES:
        pytest.skip(f"HookedTransformer of TransformerLens {TL_MAJOR} has no architecture for {name}")
    return as_hooked(hf_model(name, **changes))


def as_hooked(model: transformers.PreTrainedModel) -> HookedTransformer:
    """Copy a Hugging Face model into a `HookedTransformer`; skips the test under TransformerLens 4."""
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        pytest.skip("HookedTransformer was removed in TransformerLens 4")
    return build_hooked(model)


def load(kind: str, name: str) -> TransformerBridge | HookedTransformer:
    """`bridge(name)` or `hooked(name)`, whichever `kind` says."""
    return {"bridge": bridge, "hooked": hooked}[kind](name)


needs_hooked = pytest.mark.skipif(TL_MAJOR >= 4, reason="HookedTransformer was removed in TransformerLens 4")
KINDS = ["bridge", pytest.param("hooked", marks=[pytest.mark.slow, needs_hooked])]
"""TransformerLens's classes, for ``parametrize("kind", ...)``: the bridge is fast."""


SCORES_IN_HOOKED = ("gptj",)
"""Architectures whose bridge discards edited scores, so that edits of scores act in a `HookedTransformer` alone."""


def cases(*architectures: str) -> list[Any]:
    """The models on which a law is tried, for ``parametrize(("kind", "name"), ...)``: the lanes are marked here.

    ``architectures`` add a mechanism to the law (`MECHANISMS`). Each is tried on a bridge; the first, and those of
    `SCORES_IN_HOOKED`, also as a `HookedTransformer`. The first on a bridge is fast, all others are slow.
    """
    unknown = set(architectures) - set(ARCHITECTURES)
    if unknown:
        raise ValueError(f"no such architecture: {sorted(unknown)}")
    first, in_order = architectures[0], list(dict.fromkeys(architectures))
    in_hooked = {first, *SCORES_IN_HOOKED} & set(HOOKED_NAMES)
    pairs = [("bridge", name) for name in in_order if name in (*BRIDGE_NAMES, *HYBRID_NAMES)]
    return _all_but_slow(("bridge", first), [*pairs, *(("hooked", name) for name in in_order if name in in_hooked)])


def every_case() -> list[Any]:
    """All architectures in both classes, for laws to which each adds something: that it is read as it is."""
    pairs = [("bridge", name) for name in BRIDGE_NAMES] + [("hooked", name) for name in HOOKED_NAMES]
    return _all_but_slow(("bridge", "llama-gqa"), pairs)


def names(*architectures: str) -> list[Any]:
    """The bridges of `cases`, for ``parametrize("name", ...)`` in tests that build one class: the first is fast."""
    on_bridge = [case for case in cases(*architectures) if case.values[0] == "bridge"]
    return [pytest.param(case.values[1], marks=case.marks, id=case.values[1]) for case in on_bridge]


def _all_but_slow(fast: tuple[str, str], pairs: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, marks=[] if pair == fast else pytest.mark.slow, id="-".join(pair)) for pair in pairs]
