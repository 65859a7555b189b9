"""Packaged models as folders of safetensors: converted once from GGUF by transformers, and kept in the user's cache.

A model's folder is ``tl_posdisent/NAME/CHECKSUM`` in the assets folder of huggingface_hub: ``HF_ASSETS_CACHE``, by
default ``assets`` in ``HF_HOME``, which is ``huggingface`` in ``XDG_CACHE_HOME`` or in ``~/.cache``. It is written
beside that folder and renamed when it is complete, while a lock is held, so that of several processes one converts and
the others wait for it.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tl_posdisent.models.loading.checkpoint import check_complete, read_checkpoint
from tl_posdisent.models.loading.packaged import PACKAGED, SAMPLE, joined_file, packaged_pieces
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import first_line

_WEIGHTS = "model.safetensors"
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")  # the others of a converted model


def read_packaged(name: str, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model of ``PACKAGED`` and its tokenizer, converted from GGUF to float32 on the first call.

    Raises:
        ValueError: a package that is not installed, or is damaged; a version of transformers that converts it wrongly.
    """
    pieces = packaged_pieces(name)
    with _converted(name, pieces) as folder:
        model, tokenizer = read_checkpoint(folder, dtype=dtype)
    assert tokenizer is not None
    # TransformerLens would load a tokenizer that has a path from there again, and begin every text with the BOS token.
    tokenizer.init_kwargs.pop("name_or_path", None)
    tokenizer.name_or_path = PACKAGED[name].title
    return model, tokenizer


@contextmanager
def _converted(name: str, pieces: Sequence[Path]) -> Iterator[Path]:
    """Yield the folder of a converted model: that in the cache, or a temporary one if nothing can be kept there."""
    cache = Path(constants.HF_ASSETS_CACHE, "tl_posdisent", name)
    try:
        folder = _kept(name, pieces, cache)
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"{name} is converted whenever it is loaded, as it cannot be kept in {cache} ({first_line(error)}): set "
            "HF_HOME or XDG_CACHE_HOME to a folder that can be written",
            stacklevel=6,  # where load_model is called
        )
        with tempfile.TemporaryDirectory(prefix="tl_posdisent_") as temporary:
            _convert(name, pieces, Path(temporary))
            yield Path(temporary)
        return
    yield folder


def _kept(name: str, pieces: Sequence[Path], cache: Path) -> Path:
    """Return the model's folder in the cache, converted by this or another process."""
    folder, unfinished = cache / PACKAGED[name].sha256[:16], cache / "unfinished"
    if _is_whole(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        if _is_whole(folder):  # converted by another process meanwhile
            return folder
        for old in (x for x in cache.iterdir() if x.is_dir()):  # damaged, of another checksum, or of a killed process
            shutil.rmtree(old)
        try:
            unfinished.mkdir()
            _convert(name, pieces, unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Say whether a folder has all files of a model, and weights as long as their header says."""
    try:
        with safe_open(folder / _WEIGHTS, framework="pt"):
            return all((folder / file).is_file() for file in _FILES)
    except (OSError, SafetensorError):
        return False


def _convert(name: str, pieces: Sequence[Path], folder: Path) -> None:
    """Write the model of a GGUF file as safetensors in float32, with its configuration and tokenizer."""
    if find_spec("gguf") is None:
        raise ArgumentError(
            name, "needs the package gguf to convert its weights, which is not installed: pip install gguf"
        )
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
