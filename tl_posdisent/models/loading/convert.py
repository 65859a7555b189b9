"""Convert Hugging Face weights to a HookedTransformer, and check that the two compute the same logits.

Needs TransformerLens 3, which is imported only when used, so that the rest of the package runs with versions that
no longer have HookedTransformer.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import first_line

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
else:  # for run-time type checkers
    HookedTransformer, HookedTransformerConfig = torch.nn.Module, Any


def comparison_tokens(hf_model: PreTrainedModel) -> Int[Tensor, "1 pos"]:
    """Draw seeded random token ids on which to compare models: 128, or as many as a shorter context has."""
    config = hf_model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or 128, 128)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
    return tokens.to(next(hf_model.parameters()).device)


def _different(what: str, how: str) -> ValueError:
    return ValueError(f"{what} does not compute what the original does: its {how}")


@torch.no_grad()
def hf_logits(hf_model: PreTrainedModel, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos vocab"]:
    """Compute the logits of the original; raise ValueError if it fails by itself, as kernels for other devices do."""
    try:
        logits: Tensor = hf_model(tokens, use_cache=False).logits
    except Exception as error:
        why = (
            f"{type(hf_model).__name__} fails on {tokens.shape[1]} tokens ({type(error).__name__}: {first_line(error)})"
        )
        raise ArgumentError(
            "model", f"must run, but {why}: correct its configuration, or load it on another device or in another dtype"
        ) from error
    return logits


def check_same_logits(
    got: Float[Tensor, "batch pos vocab"],
    expected: Float[Tensor, "batch pos vocab"],
    *,
    what: str,
) -> None:
    """Raise ValueError unless the logits agree: largest difference at most 1e-3 of the largest logit.

    In a 16-bit type, where rounding alone makes larger single differences, the root mean square of the difference must
    be at most a tenth of that of the logits. Expected logits that are not finite are refused.
    """
    if got.shape != expected.shape:
        raise _different(what, f"logits have shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
    precise = expected.dtype in (torch.float32, torch.float64)
    norm = partial(torch.linalg.vector_norm, ord=torch.inf if precise else 2)
    error, size = float(norm(got.float() - expected.float())), float(norm(expected.float()))
    if not isfinite(size):
        advice = (
            "load it in bfloat16 or float32" if expected.dtype == torch.float16 else "its weights may not be either"
        )
        raise ArgumentError(
            "model", f"must have finite logits, but those of the original are not, in {expected.dtype}: {advice}"
        )
    factor, n = (1e-3, 1.0) if precise else (0.1, expected.numel() ** 0.5)
    error, allowed = error / n, factor * size / n
    if not error <= allowed:  # also true for NaN
        raise _different(what, f"logits differ by {error:.3g} (allowed {allowed:.3g})")


def _llama_fields(hf_model: PreTrainedModel, rope: dict[str, Any]) -> dict[str, Any]:
    """Return configuration fields that TransformerLens ignores in a Llama: head size and scaled frequencies."""
    config, kind = hf_model.config, rope.get("rope_type", "default")
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {"d_head": d_head, "rotary_dim": d_head, "attn_scale": d_head**0.5}
    if kind == "linear":
        fields["rotary_scaling_factor"] = rope["factor"]
    elif kind == "llama3":
        fields |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_factor": rope["factor"],
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_original_ctx_len": rope["original_max_position_embeddings"],
        }
    elif kind == "yarn":
        # The factor that multiplies cos and sin is often not in the configuration; read it from the model.
        scaling = next((m.attention_scaling for m in hf_model.modules() if hasattr(m, "attention_scaling")), 1.0)
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        fields |= {
            "use_yarn_rope": True,
            "yarn_factor": rope["factor"],
            "yarn_attention_factor": scaling,
            "yarn_beta_fast": rope.get("beta_fast") or 32.0,
            "yarn_beta_slow": rope.get("beta_slow") or 1.0,
            "yarn_truncate": rope.get("truncate", True),
            "yarn_original_max_position_embeddings": original,
        }
    return fields


def _converted(hf_model: PreTrainedModel) -> tuple[HookedTransformerConfig, dict[str, Tensor]]:
    """Make the configuration and state dict for any architecture that TransformerLens converts."""
    from transformer_lens import loading_from_pretrained as loading

    name, parameter = type(hf_model).__name__, next(hf_model.parameters())
    # TransformerLens reads the architecture from a directory (the configuration is enough), unless its path has the
    # name of a model, which would be refused as another model.
    with tempfile.TemporaryDirectory(prefix="posdisent-") as folder:
        hf_config = copy.deepcopy(hf_model.config).to_dict() | {"architectures": [name]}
        if "n_positions" in hf_config:  # GPT-2: TransformerLens looks for the older name
            hf_config.setdefault("n_ctx", hf_config["n_positions"])
        (Path(folder) / "config.json").write_text(json.dumps(hf_config, default=str))
        config = loading.get_pretrained_model_config(
            folder, hf_cfg=hf_config, fold_ln=False, device=str(parameter.device), dtype=parameter.dtype
        )
        config.tokenizer_name, config.model_name = None, "custom"  # instead of the name of the temporary directory
        rope = getattr(hf_model.config, "rope_parameters", None) or {}  # nested where layers differ
        if config.positional_embedding_type == "rotary" and "rope_theta" in rope:
            config.rotary_base = rope["rope_theta"]  # not read for every architecture
        for field, value in _llama_fields(hf_model, rope).items() if name == "LlamaForCausalLM" else ():
            setattr(config, field, value)
        return config, loading.get_pretrained_state_dict(folder, config, hf_model=hf_model, dtype=parameter.dtype)


def _check_rotary_tables(model: HookedTransformer, hf_model: PreTrainedModel, *, what: str) -> None:
    """Compare the rotation angles over the whole context: slow frequencies do not differ visibly in a short text."""
    modules = [m for m in hf_model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    attention: Any = model.blocks[0].attn
    if len(modules) != 1 or not hasattr(attention, "rotary_cos"):
        return  # no rotation, or several kinds of layers: only logits are compared
    frequency: Any = modules[0].inv_freq
    cos = attention.rotary_cos.float()
    half = cos.shape[-1] // 2
    columns = cos[:, ::2] if model.cfg.rotary_adjacent_pairs else cos[:, :half]
    rows = min(len(columns), model.cfg.n_ctx)
    scaling = float(getattr(modules[0], "attention_scaling", 1.0))
    angle = torch.arange(rows, device=cos.device)[:, None] * frequency.float().to(cos.device)
    tolerance = 5e-3 if attention.rotary_cos.dtype == torch.float32 else 5e-2
    if angle.shape != columns[:rows].shape or not torch.allclose(
        angle.cos() * scaling, columns[:rows], atol=tolerance, rtol=0.0
    ):
        raise _different(what, "rotary frequencies differ")


def _check_lengths(model: HookedTransformer, hf_model: PreTrainedModel, *, what: str) -> None:
    """Refuse what a comparison on short texts cannot see: long sliding windows, rotations that change with length."""
    named = [getattr(module, "rope_type", None) for module in hf_model.modules()]
    kinds = {kind for x in named for kind in (x.values() if isinstance(x, dict) else [x]) if isinstance(kind, str)}
    if changing := sorted(kinds - {"default", "linear", "llama3", "yarn"}):
        raise _different(what, f"rotary frequencies change with the length of the text (rope_type {changing[0]})")
    config: Any = hf_model.config.get_text_config()
    window, n_ctx = getattr(config, "sliding_window", None), model.cfg.n_ctx
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_layers", None) is not None:  # GPT-Neo
        window = config.window_size
        layers = ["sliding_attention" if kind == "local" else "" for kind in config.attention_layers]
    if getattr(config, "use_sliding_window", True) is False or not window or window >= n_ctx:
        window = None
    wanted = [window if kind == "sliding_attention" else None for kind in layers]
    own = [model.cfg.window_size if block.attn.attn_type == "local" else None for block in model.blocks]
    found = [size if size and size < n_ctx else None for size in own]
    if wanted != found:
        raise _different(what, f"sliding windows, layer by layer, are {found} instead of {wanted}")


def to_hooked(hf_model: PreTrainedModel) -> HookedTransformer:
    """Convert a model and compare it with the original (see ``hooked_from_hf``)."""
    from transformer_lens import HookedTransformer

    name = type(hf_model).__name__
    tokens = comparison_tokens(hf_model)
    try:
        config, state = _converted(hf_model)
        with warnings.catch_warnings():  # ignore the notice that the class is deprecated
            warnings.filterwarnings("ignore", message="HookedTransformer", category=DeprecationWarning)
            model = HookedTransformer(config)
        # Not load_and_process_state_dict: even with all processing off, it traverses the model once per weight.
        model.load_state_dict(model.fill_missing_keys(state), strict=False)
        model.eval()
        with torch.no_grad():
            got = model(tokens)
    except Exception as error:  # the converter fails in many ways on a model that it was not written for
        why = first_line(error)
        raise ValueError(f"TransformerLens cannot convert {name} to a HookedTransformer: {why}") from error
    what = f"the HookedTransformer made of {name}"
    check_same_logits(got, hf_logits(hf_model, tokens), what=what)
    _check_lengths(model, hf_model, what=what)
    _check_rotary_tables(model, hf_model, what=what)
    return model
