"""Read a Hugging Face folder or repository: the whole model and its tokenizer, or an error.

transformers fills missing tensors with random numbers and ignores those that it does not know; both are refused here,
by name. Everything else that it refuses is passed on as one ValueError with its message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from tl_posdisent.utils.validation import first_line, printable
from tl_posdisent.utils.words import plural

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_OF_TORCH = (None, "eager", "sdpa")  # what every installation has; others, such as flash_attention_2, are kernels
# Causal masks, which GPT-2's relatives had as buffers until 2023. transformers lists them for some of these only.
_MASKS = re.compile(r"\.\d+\.attn(\.attention)?\.(bias|masked_bias|causal_mask)$")
# Parts that a model of text has no use for.
_NOT_TEXT = re.compile(r"^(model\.)?(vision|visual|image|audio|multi_modal)")
_SHOWN = 3  # names of tensors in an error
_TIMEOUT = 10  # seconds for an answer of the hub


def read_checkpoint(
    source: str | Path, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer (if any) from a folder or a repository, without running code from there.

    If the hub cannot be reached, a repository is read from its cache. Weights in pickles are not read. Attention
    kernels that ``config.json`` asks for are replaced by eager attention, which is what hooks need.

    Raises:
        ValueError: a tensor that is missing, has another shape, or that the model would ignore; an adapter that is not
            merged; a repository that is not in the cache while the hub cannot be reached; whatever transformers cannot
            load, with its message.
    """
    local = isinstance(source, Path) or not _hub_answers(source)
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    try:
        if local and isinstance(source, str):
            _check_cached(source)
        _refuse_adapter(source, local=local)
        config = AutoConfig.from_pretrained(source, **options)
        kernel = {} if config._attn_implementation in _OF_TORCH else {"attn_implementation": "eager"}
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **kernel,
            **options,
        )
        check_complete(report, text_alone=type(model.config) is not type(config))
        tokenizer = None
        if not isinstance(source, Path) or any((source / name).is_file() for name in _TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # transformers fails in many ways on files that it was not written for
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise ValueError(
            f"cannot load a causal language model from {printable(str(source))}: {kind}{first_line(error)}"
        ) from error
    return model, tokenizer


def _hub_answers(name: str) -> bool:
    """Ask the hub once for a file of a repository; transformers would ask for each file again and again for minutes."""
    if constants.HF_HUB_OFFLINE:
        return False
    with contextlib.suppress(Exception):  # of whichever library asks the network
        with contextlib.suppress(HfHubHTTPError):  # an answer: there is no such file, or only for some
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_TIMEOUT)
        return True
    return False


def _check_cached(name: str) -> None:
    """Raise ValueError unless the hub's cache has a repository."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no answer"
    raise ValueError(
        f"it is not in the hub's cache, {printable(str(constants.HF_HUB_CACHE))}, and the hub cannot be reached "
        f"({why}): load it once where there is a network, or pass the path of a folder"
    )


def check_complete(report: Mapping[str, Any], *, text_alone: bool = False) -> None:
    """Raise ValueError for tensors that are missing, have another shape, or are not part of the model.

    ``report`` is what ``from_pretrained(output_loading_info=True)`` returns. What transformers lists as ignorable is
    not in it: tied weights, and buffers that older versions stored. ``text_alone`` says that the class is the text part
    of a model that also sees or hears, as for Llama 4.
    """
    missing = sorted(report["missing_keys"])
    shapes = sorted((name, tuple(stored), tuple(needed)) for name, stored, needed in report["mismatched_keys"])
    ignored = sorted(name for name in report["unexpected_keys"] if not _MASKS.search(name))
    ignored = [name for name in ignored if not (text_alone and _NOT_TEXT.match(name))]
    problems = []
    if missing:
        problems.append(f"the file lacks {_tensors(missing)}, which would be random")
    if shapes:
        name, stored, needed = shapes[0]
        more = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        problems.append(f"{printable(name)} has shape {stored} in the file and {needed} in the model{more}")
    if ignored:
        problems.append(f"the model would ignore {_tensors(ignored)} of the file")
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}: correct config.json, or save the whole model, with adapters merged and weights "
            "not quantised, with save_pretrained"
        )


def _tensors(names: Sequence[str]) -> str:
    first = ", ".join(printable(name)[:80] for name in names[:_SHOWN])
    return f"{plural(len(names), 'tensor')} ({first}{', …' if len(names) > _SHOWN else ''})"


def _refuse_adapter(source: str | Path, *, local: bool) -> None:
    """Raise ValueError for an adapter: without the package peft, transformers would load the model without it."""
    if find_adapter_config_file(source, local_files_only=local) is not None:
        raise ValueError(
            "it has an adapter (adapter_config.json), which is not applied here: merge it into its model "
            "(merge_and_unload of the package peft) and save that with save_pretrained, or remove that file to load "
            "the model alone"
        )
