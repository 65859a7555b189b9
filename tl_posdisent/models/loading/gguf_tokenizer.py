"""The tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tl_posdisent.utils.validation import is_integer, shown

_PREFIX = "tokenizer.ggml."
# Keys of a file, and their names in transformers' conversion.
_NAMES = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_LISTS = {"tokens": "U", "merges": "U", "scores": "f", "token_type": "biu", "precompiled_charsmap": "biu"}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_of(architecture: str, model_type: str, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer that the metadata describes, with transformers.

    Args:
        architecture: as the file states it.
        model_type: its name in transformers, by which versions before 5.2x choose the kind of tokenizer.
        metadata: the file's metadata.

    Raises:
        ValueError: metadata of the wrong type or length, ids of tokens that do not exist, an unsupported kind of
            tokenizer.
    """
    given = {name: metadata[_PREFIX + key] for key, name in _NAMES.items() if _PREFIX + key in metadata}
    lists = {key: _list(key, metadata[_PREFIX + key]) for key in _LISTS if _PREFIX + key in metadata}
    tokens = lists.get("tokens")
    if not tokens or not isinstance(given.get("tokenizer_type"), str):
        raise ValueError(f"it does not state {_PREFIX}model and {_PREFIX}tokens, a tokenizer")
    for key in ("scores", "token_type"):
        if len(lists.get(key, tokens)) != len(tokens):
            raise ValueError(f"{_PREFIX}{key} must have {len(tokens)} elements, as there are tokens")
    if wrong := next((x for x in lists.get("merges", ()) if x.count(" ") != 1), None):
        raise ValueError(
            f"{_PREFIX}merges must hold two tokens each, with a space between them, and has {shown(wrong)}"
        )
    ids = special_tokens(metadata)
    options: dict[str, Any] = {f"{name}_token": None if n is None else tokens[n] for name, n in ids.items()}
    for name in ("add_bos_token", "add_eos_token"):
        if _PREFIX + name in metadata:
            options[name] = metadata[_PREFIX + name] is True
    if given["tokenizer_type"] == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp does for sentencepiece
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        options["chat_template"] = template
    try:
        convert, named = _conversion(architecture, model_type)
        backend, more = convert(named, given | lists)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **(options | more))
    except Exception as error:  # many kinds: a merge of strings that are not tokens, an unknown kind of tokenizer
        raise ValueError(f"transformers cannot build its tokenizer ({type(error).__name__}): {error}") from error


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the ids of the tokens bos, eos, unk and pad; None for those that the file does not state.

    Raises:
        ValueError: ids of tokens that the file does not have.
    """
    tokens = metadata.get(f"{_PREFIX}tokens")
    count, found = len(tokens) if isinstance(tokens, list) else 0, {}
    for name, stored in _SPECIAL.items():
        key = f"{_PREFIX}{stored}_token_id"
        number = found[name] = metadata.get(key)
        if number is not None and not (is_integer(number) and 0 <= number < count):
            raise ValueError(f"{key} must be one of {count} tokens, and is {shown(number)}")
    return found


def _list(key: str, found: Any) -> list[Any]:
    if isinstance(found, np.ndarray) and found.dtype.kind in _LISTS[key]:
        numbers: list[Any] = found.tolist()
        return numbers
    if isinstance(found, list) and _LISTS[key] == "U":
        return found
    raise ValueError(f"{_PREFIX}{key} must be an array of {'strings' if _LISTS[key] == 'U' else 'numbers'}")


def _conversion(architecture: str, model_type: str) -> tuple[Callable[[str, Any], tuple[Any, dict[str, Any]]], str]:
    """Return the conversion function of transformers, and its name for the architecture."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer

        return convert_gguf_tokenizer, architecture
    except ImportError:
        from transformers.integrations.ggml import convert_gguf_tokenizer

        return convert_gguf_tokenizer, architecture if architecture == "llama" else model_type
