"""Read a Hugging Face folder or repository: the whole model and its tokenizer, or an error that names what is wrong.

transformers fills missing tensors with random numbers, ignores those that it does not know, and fails in many ways on
files that it was not written for. All of these become one ValueError.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import find_adapter_config_file

from tl_posdisent.utils.validation import first_line, printable, shown
from tl_posdisent.utils.words import plural

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_JSON_OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_JSON = (_CONFIG, "generation_config.json", _INDEX, *_JSON_OF_TOKENIZER)
_OF_TORCH = (None, "eager", "sdpa")  # what every installation has; others, such as flash_attention_2, are kernels
# Causal masks, which GPT-2's relatives had as buffers until 2023. transformers lists them for some of these only.
_MASKS = re.compile(r"\.\d+\.attn(\.attention)?\.(bias|masked_bias|causal_mask)$")
_NOT_TEXT = re.compile(
    r"^(model\.)?(vision|visual|image|audio|multi_modal)"
)  # parts that a model of text has no use for
_SHOWN = 3  # names of tensors in an error


def read_checkpoint(
    source: str | Path, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer (if any) from a folder or a repository, without running code from there.

    Weights in pickles are not read. Attention kernels that ``config.json`` asks for are replaced by eager attention,
    which is what hooks need.

    Raises:
        ValueError: a file that is missing, damaged or not as transformers needs it; an adapter that is not merged;
            quantised weights whose library is not installed; a tensor that is missing, has another shape, or that the
            model would ignore.
    """
    local = isinstance(source, Path)
    config = _configuration(source, local)
    kernel = config._attn_implementation
    options: dict[str, Any] = {} if kernel in _OF_TORCH else {"attn_implementation": "eager"}
    with _explained(source, f"load the model that {_CONFIG} describes", _advice_for(config)):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            local_files_only=local,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **options,
        )
    _check_complete(source, report, text_alone=type(model.config) is not type(config))

    tokenizer = None
    if not local or any(_path(source, name) for name in _TOKENIZER):
        with _explained(source, "load the tokenizer", f"correct its files, such as {_TOKENIZER[0]}, or remove them"):
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    return model, tokenizer


def _check_complete(source: str | Path, report: Mapping[str, Any], *, text_alone: bool) -> None:
    """Raise ValueError for tensors that are missing, have another shape, or are not part of the model.

    ``report`` is what ``from_pretrained(output_loading_info=True)`` returns. What transformers lists as ignorable is
    not in it: tied weights, and buffers that older versions stored. ``text_alone`` says that the class is the text part
    of a model that also sees or hears, as for Llama 4.
    """
    lacking = sorted(report["missing_keys"])
    shapes = sorted((name, tuple(found), tuple(needed)) for name, found, needed in report["mismatched_keys"])
    ignored = sorted(name for name in report["unexpected_keys"] if not _MASKS.search(name))
    ignored = [name for name in ignored if not (text_alone and _NOT_TEXT.match(name))]
    problems = []
    if lacking:
        problems.append(f"the file lacks {_tensors(lacking)}, which would be random")
    if shapes:
        name, found, needed = shapes[0]
        more = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        problems.append(f"{printable(name)} has shape {found} in the file and {needed} in the model{more}")
    if ignored:
        problems.append(f"the model would ignore {_tensors(ignored)} of the file")
    if problems:
        raise _refusal(
            source,
            f"{'; '.join(problems)}: correct {_CONFIG}, or save the whole model, with adapters merged and weights "
            "not quantised, with save_pretrained",
        )


def _tensors(names: Sequence[str]) -> str:
    some = ", ".join(printable(name)[:80] for name in names[:_SHOWN])
    return f"{plural(len(names), 'tensor')} ({some}{', …' if len(names) > _SHOWN else ''})"


def _configuration(source: str | Path, local: bool) -> Any:
    """Read the configuration; refuse what transformers would load without saying that it ignores a part of it."""
    problem: str | None
    with _explained(source, f"read {_CONFIG}", f"correct {_CONFIG}"):
        adapter = find_adapter_config_file(source, local_files_only=local) or _path(source, "adapter_model.safetensors")
        if adapter:
            problem = (
                f"it has an adapter ({Path(adapter).name}), which is not applied here: merge it into its model "
                "(merge_and_unload of the package peft) and save that with save_pretrained, or remove that file to "
                "load the model alone"
            )
        else:
            config = AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
            problem = _problem(config)
            if _path(source, _INDEX) and _path(source, _WEIGHTS):
                problem = f"it has both {_WEIGHTS} and {_INDEX}, which names other files: remove one of them"
    if problem:
        raise _refusal(source, problem)
    return config


def _problem(config: Any) -> str | None:
    """Return what is wrong with a configuration that transformers accepts: no layers, or quantisation it ignores."""
    for name in ("num_hidden_layers", "max_position_embeddings"):
        n = getattr(config.get_text_config(), name, None)
        if isinstance(n, int) and n < 1:
            return f"{name} of {_CONFIG} must be at least 1, got {n}"
    stated = _quantisation(config)
    if stated is not None and not AutoHfQuantizer.supports_quant_method(stated):
        return (
            f"{_CONFIG} states the quantisation {shown(stated.get('quant_method'))}, which transformers "
            f"{transformers.__version__} does not know: take the weights that are not quantised"
        )
    return None


def _quantisation(config: Any) -> Any:
    """Return what a configuration says of the quantisation of the weights, or None if they are not quantised."""
    parts = (config, config.get_text_config())
    return next((x for part in parts if (x := getattr(part, "quantization_config", None)) is not None), None)


def _advice_for(config: Any) -> str:
    stated = _quantisation(config)
    if stated is None:
        return f"correct {_CONFIG}, or save the model in safetensors with save_pretrained"
    return (
        f"{_CONFIG} states the quantisation {shown(stated.get('quant_method'))}: install what it needs, or take the "
        "weights that are not quantised"
    )


# --- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(source: str | Path, work: str, advice: str) -> Iterator[None]:
    """Turn every exception into one ValueError that names the file at fault and says what to do."""
    try:
        yield
    except Exception as error:  # transformers fails in many ways on files that it was not written for
        if damage := _damage(source):
            raise _refusal(source, f"{damage}: download or save it again") from error
        why = (_failed_merges(error) or first_line(error)).rstrip(" .")
        if isinstance(error, (LookupError, TypeError, AttributeError, ArithmeticError)):
            why = f"{type(error).__name__}: {why}"
        if _path(source, _CONFIG) is None:  # nothing was found, so nothing can be corrected
            raise _refusal(source, f"it has no {_CONFIG}" if isinstance(source, Path) else why) from error
        raise _refusal(source, f"transformers {transformers.__version__} cannot {work} ({why}): {advice}") from error


def _refusal(source: str | Path, problem: str) -> ValueError:
    return ValueError(f"cannot load a causal language model from {printable(str(source))}: {problem}")


def _path(source: str | Path, name: str) -> Path | None:
    """Return a file of a folder, or of a repository as far as it is in the hub's cache."""
    try:
        found: Any = source / name if isinstance(source, Path) else try_to_load_from_cache(source, name)
    except ValueError:  # not the name of a repository
        return None
    return Path(found) if isinstance(found, (str, Path)) and Path(found).is_file() else None


def _damage(source: str | Path) -> str | None:
    """Name the first file that is missing or not what its name says: an object in JSON, or whole tensors."""
    config = _path(source, _CONFIG)
    if config is None:
        return None
    for path in (config.parent / name for name in _JSON):
        try:
            content = json.loads(path.read_bytes()) if path.exists() else {}
        except (ValueError, OSError, RecursionError) as error:
            return f"{path.name} is not valid JSON ({first_line(error)})"
        if not isinstance(content, dict):
            return f"{path.name} must hold a JSON object, not {shown(content)}"
        if path.name != _INDEX or not path.exists():
            continue
        shards = content.get("weight_map")
        if not (isinstance(shards, dict) and shards and isinstance(content.get("metadata"), dict)):
            return f"{_INDEX} must have metadata and a weight_map of tensors to files"
        for name in sorted({*map(str, shards.values())}):
            if not (config.parent / name).is_file():
                return f"{printable(name)[:80]} is missing, which {_INDEX} names"
    for path in sorted(config.parent.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{printable(path.name)} is not a whole safetensors file ({first_line(error)})"
    return None


def _failed_merges(error: BaseException) -> str | None:
    """Name the tensors that transformers could not merge from parts, such as experts, of which one does not fit.

    Its error refers to a log that nobody sees, because TransformerLens turns it off.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if failed := getattr(frame.f_locals.get("loading_info"), "conversion_errors", None):
            why = str(next(iter(failed.values()))).strip().splitlines()
            return f"{_tensors(sorted(failed))} cannot be made of parts in the file: {why[-2 if len(why) > 1 else -1]}"
    return None
