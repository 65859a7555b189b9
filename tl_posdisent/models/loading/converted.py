"""Packaged models as folders of safetensors: converted once from GGUF by transformers, and kept in the user's cache.

A model's folder is ``tl_posdisent/NAME/CHECKSUM`` in the assets folder of huggingface_hub: ``HF_ASSETS_CACHE``, by
default ``assets`` in ``HF_HOME``, which is ``huggingface`` in ``XDG_CACHE_HOME`` or in ``~/.cache``. It is written
beside that folder and renamed when it is complete. A folder whose files are not those that were written is replaced.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tl_posdisent.models.loading.checkpoint import check_complete, read_checkpoint
from tl_posdisent.models.loading.packaged import PACKAGED, SAMPLE, joined_file, packaged_pieces
from tl_posdisent.utils.errors import ArgumentError

_CHECKSUMS = "checksums.json"
_BLOCK = 2**20  # bytes that are read at once


def read_packaged(
    name: str, *, dtype: torch.dtype, n_ctx: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model of ``PACKAGED`` and its tokenizer, converted from GGUF to float32 on the first call.

    Raises:
        ValueError: a package that is not installed, or is damaged; a version of transformers that converts it wrongly.
        OSError: a cache that cannot be written.
    """
    model, tokenizer = read_checkpoint(_converted(name), dtype=dtype, n_ctx=n_ctx)
    assert tokenizer is not None
    # TransformerLens would load a tokenizer that has a path from there again, and begin every text with the BOS token.
    tokenizer.init_kwargs.pop("name_or_path", None)
    tokenizer.name_or_path = PACKAGED[name].title
    return model, tokenizer


def _converted(name: str) -> Path:
    """Return a model's folder in the cache; convert the model first if it is not there, or is damaged."""
    cache = Path(constants.HF_ASSETS_CACHE, "tl_posdisent", name)
    folder = cache / PACKAGED[name].sha256[:16]
    if _intact(folder):
        return folder
    pieces = packaged_pieces(name)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as unfinished:
        whole = Path(unfinished, "model")
        _convert(name, pieces, whole)
        try:
            if folder.exists() and not _intact(folder):
                folder.rename(Path(unfinished, "damaged"))
            whole.rename(folder)
        except OSError:
            if not _intact(folder):  # else another process converted it meanwhile
                raise
    return folder


def _convert(name: str, pieces: Sequence[Path], folder: Path) -> None:
    """Write the model of a GGUF file as safetensors in float32, with configuration, tokenizer and checksums."""
    # Newer versions of transformers leave weights packed where they have a kernel for them.
    unpacked = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    with joined_file(pieces) as file:
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **unpacked,
        )
        # Not AutoTokenizer: the class of Gemma's tokenizer pads on the left, and takes five times as long.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    check_complete(report)
    if tuple(tokenizer.encode(SAMPLE, add_special_tokens=False)) != PACKAGED[name].sample_ids:
        raise ArgumentError(
            name,
            f"needs a transformers that reads its tokenizer, and {transformers.__version__} reads another one from its "
            "GGUF file: install 5.18 to 5.23",
        )
    model.config.initializer_range = PACKAGED[name].initializer_range
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / _CHECKSUMS).write_text(json.dumps(_checksums(folder)), encoding="utf-8")


def _intact(folder: Path) -> bool:
    """Say whether a folder has the files that were written, and no others."""
    try:
        stated = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return bool(stated == _checksums(folder))
    except (OSError, ValueError):  # no folder, one of an earlier version, or not JSON
        return False


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each visible file, which shows any damage and takes half the time of SHA-256."""
    names = sorted(path.name for path in folder.iterdir() if path.name != _CHECKSUMS and not path.name.startswith("."))
    return {name: _checksum(folder / name) for name in names}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
