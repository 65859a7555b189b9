"""Rows about models: of another kind, without rotation, compiled, quantised, in training, with hooks, frozen."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pandas as pd
import torch
from support import zoo
from support.untouched import state

from tl_posdisent import (
    additivity,
    bridge_from_hf,
    capture,
    controlled_distance,
    disentanglement,
    dummy_distance,
    fit_additive,
    head_ablation,
    hooked_from_hf,
    load_demo_model,
    load_model,
    longer_context,
    random_control,
    read_attention,
    subspace_patterns,
    swap_positions,
)
from tl_posdisent.experiments import positional_subspace, rope_hadamard
from tl_posdisent.hooks import applied, phase_noise

from .given import LINEAR, TOKENS, demo, model, own
from .row import Row, gives, refused

AT = torch.arange(12)


def table(of: Any, layers: int = 1) -> pd.DataFrame:
    return additivity(of, TOKENS, layers=range(layers), progress=False)


def _same_but(change: Any, *, layers: int = 1) -> bool:
    """A change that is none to the scores: the same table, and the model stays changed."""
    spoilt = own()
    changed = change(spoilt)
    before, got = state(spoilt), table(spoilt if changed is None else changed, layers)
    return state(spoilt) == before and got.equals(table(model(), layers))


def _with_hook(of: Any) -> None:
    """A hook of the user's that looks and does nothing."""
    of.blocks[0].attn.hook_q.add_hook(lambda x, hook: None, is_permanent=True)


def _dropping(of: Any) -> None:
    of.train()
    for part in of.original_model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5


def _user_hooks_count() -> bool:
    """A user's own hook that changes queries is part of the model, and is still there afterwards."""
    spoilt = own()
    spoilt.blocks[0].attn.hook_q.add_hook(lambda x, hook: x.flip(1))
    before, got = state(spoilt), table(spoilt)
    return state(spoilt) == before and not got.equals(table(model()))


def _bfloat16() -> bool:
    """Scores rounded to 8 bits: close to those of the model in float32, and the table is float64."""
    got = table(own().to(torch.bfloat16))
    return bool(((got["r2"] - table(model())["r2"]).abs() < 0.05).all()) and str(got["r2"].dtype) == "float64"


def _quantised() -> bool:
    """Its logits are others; the table is that of the scores that it shows, and what it was made of is as it was."""
    whole = own()
    before, logits = state(whole), whole(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch is going to move it elsewhere
        eight = torch.ao.quantization.quantize_dynamic(whole, {torch.nn.Linear}, dtype=torch.qint8)
    (seen,) = capture(eight, TOKENS, layers=[1])
    fitted = torch.tensor(additivity(eight, TOKENS, layers=[1], progress=False)["r2"].tolist(), dtype=torch.float64)
    same = torch.allclose(fitted, fit_additive(seen.scores).r2.flatten(), rtol=0, atol=1e-9)
    return same and not torch.equal(eight(TOKENS), logits) and state(whole) == before


def _quantised_before() -> Any:
    hf_model = zoo.hf_model("llama-gqa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bridge_from_hf(torch.ao.quantization.quantize_dynamic(hf_model, {torch.nn.Linear}, dtype=torch.qint8))


def _tells() -> bool:
    spec = read_attention(_spoilt(float("nan")), 0)
    return "NaN" in str(spec.problem)


def _compiled_in_place() -> Any:
    compiled = own()
    compiled.compile()
    return table(compiled)


def _spoilt(value: float) -> Any:
    spoilt = own()
    with torch.no_grad():
        spoilt.original_model.model.layers[0].self_attn.q_proj.weight[0, 0] = value
    return spoilt


def _not_controlled() -> bool:
    got = disentanglement(model("gpt2"), TOKENS, progress=False)
    return bool(got[["r_three_axis", "r_two_axis"]].isna().all(axis=None)) and bool(got["r"].notna().all())


def _longer_is_undone() -> bool:
    before = state(demo())
    try:
        with longer_context(demo(), 600):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return state(demo()) == before
    return False


def _gradients_flow() -> bool:
    """Hooks change scores, and do not cut the graph: a user may train through them."""
    spoilt = own()
    with applied(spoilt, swap_positions(spoilt, AT * 2)):
        spoilt(TOKENS).sum().backward()
    return all(p.grad is not None for p in spoilt.original_model.model.layers[0].self_attn.q_proj.parameters())


ROWS: list[Row] = [
    refused("swap_positions", "learned positions", lambda at: swap_positions(model("gpt2"), AT), "GPT2"),
    refused("swap_positions", "ALiBi", lambda at: swap_positions(model("bloom"), AT), "Bloom"),
    refused("dummy_distance", "learned positions", lambda at: dummy_distance(model("gpt2"), 3), "GPT2"),
    refused("phase_noise", "ALiBi", lambda at: phase_noise(model("bloom"), 0.1), "Bloom"),
    refused(
        "controlled_distance",
        "learned positions",
        lambda at: controlled_distance(model("gpt2"), TOKENS, progress=False),
        "GPT2",
    ),
    refused(
        "subspace_patterns",
        "latent attention, rotated before any hook",
        lambda at: subspace_patterns(model("deepseek_v3"), TOKENS, progress=False),
        "DeepseekV3",
    ),
    refused("rope_hadamard", "learned positions", lambda at: rope_hadamard(model("gpt2"), TOKENS, 0), "GPT2"),
    gives("disentanglement", "learned positions have no controlled distance", lambda at: _not_controlled()),
    refused("additivity", "weights with NaN", lambda at: table(_spoilt(float("nan"))), "scores are NaN", "weights"),
    refused("capture", "weights with inf", lambda at: next(capture(_spoilt(float("inf")), TOKENS)), "NaN", "weights"),
    gives("read_attention", "weights with NaN are a problem that it tells", lambda at: _tells()),
    refused("read_attention", "a layer too many", lambda at: read_attention(model(), 2), "from 0 to 1", "got 2"),
    gives("read_attention", "the last layer as -1", lambda at: read_attention(model(), -1).layer == 1),
    refused(
        "read_attention", "a layer before the first", lambda at: read_attention(model(), -3), "from 0 to 1", "got -3"
    ),
    refused("read_attention", "half a layer", lambda at: read_attention(model(), 0.5), "from 0 to 1", "got 0.5"),
    gives("additivity", "quantised weights", lambda at: _quantised()),
    refused("bridge_from_hf", "quantised weights", lambda at: _quantised_before(), "cannot wrap LlamaForCausalLM"),
    refused("capture", "on no device", lambda at: next(capture(own().to("meta"), TOKENS)), "meta"),
    refused("additivity", "another module", lambda at: table(LINEAR), "model must be", "Linear"),
    refused("additivity", "a compiled model", lambda at: table(torch.compile(model())), "compiled", "_orig_mod"),
    refused("additivity", "a model compiled in place", lambda at: _compiled_in_place(), "compiled", "loaded anew"),
    gives(
        "additivity", "what a compiled model was made of", lambda at: _same_but(lambda m: torch.compile(m)._orig_mod)
    ),
    gives("additivity", "in training mode, with dropout", lambda at: _same_but(_dropping, layers=2)),
    gives("additivity", "frozen", lambda at: _same_but(lambda m: m.requires_grad_(False) and None)),
    gives("additivity", "requires gradients", lambda at: _same_but(lambda m: m.requires_grad_(True) and None)),
    gives("additivity", "a hook already there", lambda at: _same_but(_with_hook)),
    gives("additivity", "a hook already there that changes queries", lambda at: _user_hooks_count()),
    gives("additivity", "in bfloat16", lambda at: _bfloat16()),
    gives("additivity", "a deep copy", lambda at: _same_but(lambda m: copy.deepcopy(m))),
    gives("applied", "gradients flow through hooks", lambda at: _gradients_flow()),
    gives("longer_context", "left by Ctrl-C", lambda at: _longer_is_undone()),
    refused("applied", "no list of hooks", lambda at: _enter(applied(model(), 3)), "hooks must be a list"),
    refused("applied", "a hook that does not exist", lambda at: _enter(applied(model(), [("x", print)])), "'x'"),
    refused(
        "applied",
        "hooks that never fire",
        lambda at: _enter(applied(model(), dummy_distance(model(), 1))),
        "never fired",
        error=RuntimeError,
    ),
    refused(
        "longer_context",
        "learned positions",
        lambda at: _enter(longer_context(model("gpt2"), 10**4)),
        "length must be at most",
    ),
    refused("longer_context", "length 0", lambda at: _enter(longer_context(demo(), 0)), "length must be", "0"),
    refused("random_control", "no seed", lambda at: random_control(model(), []), "seeds must be"),
    refused("random_control", "a negative seed", lambda at: random_control(model(), [-1]), "seeds must be"),
    refused("random_control", "a seed too great", lambda at: next(random_control(model(), [2**70])), "seeds must be"),
    refused(
        "positional_subspace",
        "rank above the width",
        lambda at: positional_subspace(model(), TOKENS, 0, rank=999),
        "rank must",
    ),
    refused(
        "positional_subspace",
        "explains more than all",
        lambda at: positional_subspace(model(), TOKENS, 0, explained=1.5),
        "explained must",
    ),
    refused("positional_subspace", "one text", lambda at: positional_subspace(model(), TOKENS[:1], 0), "tokens"),
    refused(
        "head_ablation",
        "a metric that is no function",
        lambda at: head_ablation(model(), TOKENS, 3, progress=False),
        "metric must",
    ),
    refused(
        "head_ablation",
        "a metric of wrong shape",
        lambda at: head_ablation(model(), TOKENS, lambda logits, tokens: logits, progress=False),
        "metric must",
    ),
    refused("bridge_from_hf", "no model", lambda at: bridge_from_hf(None), "hf_model must be", "NoneType"),
    refused(
        "bridge_from_hf",
        "another module",
        lambda at: bridge_from_hf(LINEAR),
        "hf_model must be",
        "Linear",
    ),
    refused(
        "bridge_from_hf",
        "a bridge already",
        lambda at: bridge_from_hf(model()),
        "hf_model must be",
        "TransformerBridge",
    ),
    refused(
        "load_demo_model", "an unknown backend", lambda at: load_demo_model(backend="jax"), "backend must be one of"
    ),
    refused("load_demo_model", "seed -1", lambda at: load_demo_model(trained=False, seed=-1), "seed must be"),
    refused(
        "load_demo_model",
        "a device that is none",
        lambda at: load_demo_model(device="nowhere"),
        "device must be",
        "nowhere",
    ),
    refused("load_model", "an unknown backend", lambda at: load_model(at, backend="jax"), "backend must be one of"),
]
if zoo.TL_MAJOR < 4:
    ROWS += [
        refused("hooked_from_hf", "no model", lambda at: hooked_from_hf(None), "hf_model must be", "NoneType"),
        refused("hooked_from_hf", "a bridge", lambda at: hooked_from_hf(model()), "hf_model must be", "Bridge"),
    ]
else:
    ROWS += [
        refused(
            "hooked_from_hf",
            "TransformerLens 4",
            lambda at: hooked_from_hf(zoo.hf_model("llama")),
            "no HookedTransformer",
        )
    ]


def _enter(context: Any) -> Any:
    with context as inside:
        return inside
