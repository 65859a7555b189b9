"""Read a Hugging Face folder or repository: the whole model and its tokenizer.

transformers fills missing tensors with random numbers and ignores those that it does not know; both are refused here.
All other errors are those of transformers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tl_posdisent.utils.errors import ArgumentError

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Causal masks, which GPT-2's relatives had as buffers until 2023. transformers lists them for some of these only.
_MASKS = re.compile(r"\.\d+\.attn(\.attention)?\.(bias|masked_bias|causal_mask)$")
# Parts that a model of text has no use for.
_NOT_TEXT = re.compile(r"^(model\.)?(vision|visual|image|audio|multi_modal)")
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3  # names in an error
# Rotations that do not change with the context that a configuration states.
_FIXED_ROTATIONS = {None, "default", "linear", "llama3", "yarn", "proportional"}


def read_checkpoint(
    source: str | Path, *, dtype: torch.dtype, n_ctx: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer (if any) from a folder or a repository, without running code from there.

    Weights in pickles are not read, and attention is eager, which is what hooks need.

    Raises:
        ValueError: a tensor that is missing, has another shape, or that the model would ignore; a folder with two
            sets of weights; ``n_ctx`` for a model whose rotation depends on its context.
    """
    options: dict[str, Any] = {"local_files_only": isinstance(source, Path), "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **options)
    if (folder := source if isinstance(source, Path) else _snapshot(source)) is not None:
        _check_one_set(folder)
    if n_ctx is not None:
        set_context(config, n_ctx)
    model, report = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
    )
    check_complete(report, text_alone=type(model.config) is not type(config))
    tokenizer = None
    if not isinstance(source, Path) or any((source / name).is_file() for name in _TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return model, tokenizer


def _snapshot(repository: str) -> Path | None:
    """Return the folder of a repository in the cache of huggingface_hub, if it is there."""
    found = try_to_load_from_cache(repository, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _check_one_set(folder: Path) -> None:
    """Raise if weights that transformers does not read lie beside those that it reads: shards, or an adapter.

    ``save_pretrained`` leaves an older ``model.safetensors``, which is read first, beside new shards. It removes older
    shards, but not their index, which is harmless. So are pickles, which are never read.
    """
    if (found := next((name for name in (_FILE, _INDEX) if (folder / name).is_file()), None)) is None:
        return
    others = {path.name for path in folder.glob("adapter_model.*")}
    if found == _FILE:
        others |= {path.name for path in folder.glob("*-?????-of-?????.safetensors")}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no index, or damaged
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            others |= {name for name in index["weight_map"].values() if (folder / name).is_file()} - {_FILE}
    if others:
        raise ArgumentError(
            "name_or_dir",
            f"must be a folder with one set of weights, got one with {found} beside {_listed(sorted(others))}, of "
            "which the first alone would be read: remove the weights that you do not mean, or merge the adapter",
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"


def set_context(config: Any, n_ctx: int) -> None:
    """Change the context in a configuration of transformers; raise if the model's rotation depends on it."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [x for x in rope.values() if isinstance(x, dict)] or [rope]:  # some have one for each kind of layer
        kind = each.get("rope_type")
        if kind not in _FIXED_ROTATIONS or (kind == "yarn" and not each.get("factor")):
            raise ArgumentError("n_ctx", f"must be None for a model whose rotation depends on its context ({kind})")
    text.max_position_embeddings = n_ctx


def check_complete(report: Mapping[str, Any], *, text_alone: bool = False) -> None:
    """Raise ValueError for tensors that are missing, have another shape, or are not part of the model.

    ``report`` is what ``from_pretrained(output_loading_info=True)`` returns. What transformers lists as ignorable is
    not in it: tied weights, and buffers that older versions stored. ``text_alone`` says that the class is the text part
    of a model that also sees or hears, as for Llama 4.
    """
    needed = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    ignored = [name for name in report["unexpected_keys"] if not _MASKS.search(name)]
    ignored = [name for name in ignored if not (text_alone and _NOT_TEXT.match(name))]
    found = {"that are missing or have another shape": sorted(needed), "that the model would ignore": sorted(ignored)}
    told = [f"{len(names)} tensors {what} ({_listed(names)})" for what, names in found.items() if names]
    if told:
        raise ValueError(
            f"the weights are not those of this model: {' and '.join(told)}. Correct config.json, or save the whole "
            "model with save_pretrained, adapters merged and weights not quantised"
        )
