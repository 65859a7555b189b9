"""The tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from tl_posdisent.utils.validation import is_integer, shown

_PREFIX = "tokenizer.ggml."
# Keys of a file, and their names in transformers' conversion.
_NAMES = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "merges": "merges",
    "scores": "scores",
    "token_type": "token_type",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_of(architecture: str, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer that the metadata describes, with transformers.

    Raises:
        ValueError: metadata of the wrong type or length, ids of tokens that do not exist, an unsupported kind of
            tokenizer.
    """
    given = {name: metadata[_PREFIX + key] for key, name in _NAMES.items() if _PREFIX + key in metadata}
    tokens = given.get("tokens")
    if not tokens or not isinstance(tokens, list) or not isinstance(given.get("tokenizer_type"), str):
        raise ValueError(f"it does not state {_PREFIX}model and {_PREFIX}tokens, a tokenizer")
    for key in ("scores", "token_type"):
        listed = given.get(key, tokens)
        if not isinstance(listed, list) or len(listed) != len(tokens):
            raise ValueError(f"{_PREFIX}{key} must have {len(tokens)} elements, as there are tokens")
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
        convert, named = _conversion(architecture)
        backend, more = convert(named, given)
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


def _conversion(architecture: str) -> tuple[Callable[[str, Any], tuple[Any, dict[str, Any]]], str]:
    """Return the conversion function of transformers, and its name for the architecture."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer

        return convert_gguf_tokenizer, architecture
    except ImportError:
        from transformers.integrations.ggml import convert_gguf_tokenizer

        return convert_gguf_tokenizer, "gemma3_text" if architecture == "gemma3" else architecture
