"""Sources of a sweep: identify and load models (name, revision, folder, training step) and texts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tl_posdisent.demo import demo_model
from tl_posdisent.demo.demo_model import demo_text
from tl_posdisent.models.loading.load import Backend, load_model
from tl_posdisent.models.running.texts import text_ids
from tl_posdisent.synthetic.training.checkpoints import load_checkpoint
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import decode_text, found_at
from tl_posdisent.utils.validation import check_integer, is_integer, shown

Checkpoint = int | str | None
_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)(?:\.safetensors)?")
# Any file of a folder may affect what a model computes on a text, except those known not to: tokenizers read files of
# many names (special_tokens_map.json, added_tokens.json, spiece.model, qwen.tiktoken, chat_template.jinja …).
_NOT_READ = re.compile(
    r"\..*|(readme|licen[cs]e|notice|changelog|use_policy).*|(generation_config|trainer_state|.*_results)\.json"
    r"|.*\.(md|rst|html|pdf|png|jpe?g|gif|svg|webp|log|lock|py|ipynb|csv|jsonl|parquet|pt|pth|bin|h5|onnx|msgpack|ot)",
    re.IGNORECASE,
)
_BESIDE = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
]
_OF_HUB = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm"]
MOST_JOBS = 100_000  # of one call: each is a file, and a mistyped number of texts or seeds would fill the memory
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def checkpoint_steps(folder: str | Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending.

    Checkpoints are files ``step-000100.safetensors`` (of the demo model's training, or of ``train``), and folders such
    as ``step100`` or ``checkpoint-100`` with a Hugging Face model in each.
    """
    if not (found := _steps(Path(folder))):
        raise ArgumentError("folder", f"must have checkpoints (step-000100.safetensors, checkpoint-100/), got {folder}")
    return sorted(found)


def named(model: str | Path, checkpoint: Checkpoint) -> tuple[str, Checkpoint, str]:
    """Return model, checkpoint and a hash of what will be loaded (empty for names, which their revision identifies)."""
    if not (checkpoint is None or isinstance(checkpoint, str) or is_integer(checkpoint)):
        raise ArgumentError("checkpoint", f"must be a step, a revision or None, got {shown(checkpoint)}")
    if model == "demo":
        if checkpoint is not None:
            raise ArgumentError(
                "checkpoint",
                f"must be None for model='demo', got {shown(checkpoint)}: pass the folder of a training run",
            )
        return "demo", None, fingerprint(Path(demo_model.__file__).with_name("weights.safetensors"))
    if found_at(model):
        return str(Path(model).resolve()), checkpoint, fingerprint(place(Path(model), checkpoint))
    if isinstance(model, Path) or str(model).startswith((".", "/", "~")):
        raise ArgumentError("model", f"must be a name, or an existing file or folder, got {model}")
    return str(model), f"step{checkpoint}" if isinstance(checkpoint, int) else checkpoint, ""


def step_of(checkpoint: Checkpoint) -> int | None:
    """Return the training step, if the checkpoint's name contains it."""
    match = _STEP.fullmatch(checkpoint) if isinstance(checkpoint, str) else None
    return int(match[1]) if match else checkpoint if isinstance(checkpoint, int) else None


def place(model: Path, checkpoint: Checkpoint) -> Path:
    """Return the file or folder of the weights."""
    steps = _steps(model)
    if checkpoint is None:
        at = None if steps and not (model / "config.json").is_file() else model
    else:
        at = steps.get(checkpoint) if isinstance(checkpoint, int) else model / checkpoint
    if at is None or not at.exists():
        raise ArgumentError("checkpoint", f"must be one of {shown(sorted(steps))} for {model}, got {shown(checkpoint)}")
    return at


def fingerprint(at: Path) -> str:
    """Compute a hash of everything that determines the loaded model's output: weights, configuration, tokenizer."""
    if at.is_file():  # other files of its folder may belong to a running training
        files = [at, *(file for name in _BESIDE if (file := at.parent / name).is_file())]
    else:
        files = sorted(file for file in at.iterdir() if file.is_file() and not _NOT_READ.fullmatch(file.name))
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{'weights' if file == at else file.name}:{content};".encode())
    return whole.hexdigest()


def load(name: str, checkpoint: Checkpoint, weights: str, *, backend: Backend, dtype: str, device: str | None) -> Any:
    """Load the model of a job. Only names may use a network; no code that comes with a model is run."""
    kind = DTYPES[dtype]
    if name != "demo" and not weights:
        return _of_hub(name, checkpoint, backend, kind, device)
    if named(name if name == "demo" else Path(name), checkpoint)[2] != weights:
        raise ValueError(
            f"the weights of {name} (checkpoint {checkpoint}) have changed since this job was created: call jobs again"
        )
    at = None if name == "demo" else place(Path(name), checkpoint)
    if at is not None and at.suffix != ".safetensors":
        return load_model(at, backend=backend, dtype=kind, device=device)
    if at is not None and _is_synthetic(at):
        model: Any = load_checkpoint(at, device=device or "cpu")
    else:
        model = demo_model.load_demo_model(backend=backend, device=device, checkpoint=at)
    return model if kind == torch.float32 else model.to(kind)


def _steps(folder: Path) -> dict[int, Path]:
    found = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        if (match := _STEP.fullmatch(entry.name)) and (entry.is_dir() or entry.suffix == ".safetensors"):
            found[int(match[1])] = entry
    return found


def _of_hub(name: str, revision: Checkpoint, backend: Backend, dtype: torch.dtype, device: str | None) -> Any:
    if revision is None:
        return load_model(name, backend=backend, dtype=dtype, device=device)
    try:  # into a folder first: by name, TransformerLens would read the tokenizer of the main revision
        folder = snapshot_download(name, revision=str(revision), allow_patterns=_OF_HUB)
        return load_model(folder, backend=backend, dtype=dtype, device=device)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load revision {revision} of {name} (its weights as safetensors): {error}") from error


def _is_synthetic(at: Path) -> bool:
    """Say whether ``save_checkpoint`` wrote the file, which then has notes next to the weights."""
    try:
        with safe_open(at, framework="pt") as file:
            return "notes" in (file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ArgumentError("model", f"must be a whole safetensors file, but {at} cannot be read: {error}") from error


Kind = Literal["demo", "file", "words", "ids"]


@dataclass(frozen=True)
class Text:
    """Consecutive parts of a text, identified by the content of the text; created by ``Text.of``.

    Attributes:
        kind: ``"demo"``, a ``"file"``, ``"words"`` or token ``"ids"``.
        source: the file's path, the words, or the ids as JSON.
        sha256: hash of the content; a file that has changed since then raises an error.
        length: tokens per part, the beginning-of-text token included; None for the whole text.
        count: number of parts.
        first: index of the first part, from 0. Parts are adjacent and do not overlap.

    Example:
        >>> from tl_posdisent.sweeps import Text
        >>> text = Text.of("demo", length=128, count=8)
        >>> text, text.split(2)
        (Text demo[0:8]×128, [Text demo[0:4]×128, Text demo[4:8]×128])
    """

    kind: Kind
    source: str
    sha256: str
    length: int | None = None
    count: int = 1
    first: int = 0

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("count", 1), ("first", 0)):
            if name != "length" or self.length is not None:
                check_integer(name, getattr(self, name), least)
        if self.length is None and (self.count, self.first) != (1, 0):
            raise ArgumentError("length", "must be given with count or first, got None")
        if self.kind == "ids" and self.length is not None:
            raise ArgumentError("length", f"must be None for token ids, which are not cut, got {self.length}")

    @classmethod
    def of(
        cls,
        source: str | Path | Sequence[int] | Sequence[Sequence[int]],
        *,
        length: int | None = None,
        count: int = 1,
        first: int = 0,
    ) -> Text:
        """Describe a text by its content.

        Args:
            source: ``"demo"``, a ``Path`` of a UTF-8 file, the words themselves, or token ids ``(pos,)`` or
                ``(batch, pos)`` as lists, which are not cut (for models without a tokenizer).
            length, count, first: see ``Text``.

        Raises:
            ValueError: a file that cannot be read; no words; words that are the name of a file; ids that are not
                integers; ids with a length; numbers out of range.
        """
        kind, kept, content = _content(source)
        if not content.strip():
            raise ArgumentError("text", f"must have words, got none in {shown(source)}")
        return cls(kind, kept, _sha256(content), length, count, first)

    def split(self, parts: int) -> list[Text]:
        """Distribute the parts over several texts (fewer if there are fewer parts), for as many jobs."""
        parts = min(check_integer("parts", parts, 1), self.count)
        if parts > MOST_JOBS:
            raise ArgumentError("parts", f"must be at most {MOST_JOBS}, as each part is a job, got {parts}")
        cuts = [self.first + self.count * n // parts for n in range(parts + 1)]
        return [replace(self, first=a, count=b - a) for a, b in itertools.pairwise(cuts)]

    @property
    def name(self) -> str:
        """Short name for tables: the file's name (or a substitute), the parts and their length."""
        short = {"demo": "demo", "file": Path(self.source).name}.get(self.kind, f"{self.kind}-{self.sha256[:8]}")
        stretches = "" if self.length is None else f"[{self.first}:{self.first + self.count}]×{self.length}"
        return short + stretches

    def __repr__(self) -> str:
        return f"Text {self.name}"

    def described(self) -> dict[str, Any]:
        """Return the data that identify the text, independently of the file's path."""
        stretches = {"length": self.length, "count": self.count, "first": self.first}
        return {"ids": self.kind == "ids", "sha256": self.sha256, **stretches}

    def tokens(self, model: Any) -> Int[Tensor, "batch pos"]:
        """Tokenize the parts for a model, each with a beginning-of-text token if the model has one.

        Raises:
            ValueError: a file that is missing or has changed; a model without a tokenizer; a text that is too short.
        """
        if self.kind == "ids":
            return torch.tensor(json.loads(self.source), device="cpu")
        words = self.source
        if self.kind != "words":
            words = demo_text() if self.kind == "demo" else _read(Path(self.source))
        if _sha256(words) != self.sha256:
            raise ValueError(f"the text {self.source} has changed since this job was created: call jobs again")
        if getattr(model, "tokenizer", None) is None:
            raise ValueError("the text must be token ids, because the model has no tokenizer, got words")
        return cut(model, words, self.length, self.count, self.first)


def cut(model: Any, words: str, length: int | None, count: int = 1, first: int = 0) -> Int[Tensor, "batch pos"]:
    """Cut a text into ``count`` parts of ``length`` tokens (None: one part, the whole text), or raise ValueError.

    Each part begins with the model's beginning-of-text token, if it has one.
    """
    ids: Tensor = text_ids(model, words)[0]
    if length is None:
        return ids[None]
    begin = text_ids(model, "").flatten().to(ids)
    ids, body = ids[len(begin) :], length - len(begin)
    needed = (first + count) * body
    if needed > len(ids):
        raise ArgumentError(
            "text",
            f"has {len(ids)} tokens, too few for {count} × {length}, which need {needed}: "
            "pass a longer text, or fewer or shorter parts",
        )
    rows = ids[first * body : needed].view(count, body)
    return torch.cat([begin.to(ids).expand(count, -1), rows], 1)


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def _content(source: Any) -> tuple[Kind, str, str]:
    """Return the kind of a source, what to store of it, and what to hash."""
    if isinstance(source, Path):
        content = _read(source)
        return "file", str(source.resolve()), content
    if isinstance(source, str):
        if source == "demo":
            return "demo", "demo", demo_text()
        if found_at(source) == "file":
            raise ArgumentError("text", f"must be words or a Path, got the name of a file: pass Path({shown(source)})")
        return "words", source, source
    try:
        ids = torch.as_tensor(source, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.empty(0, device="cpu")
    if ids.dtype != torch.int64 or ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ArgumentError(
            "text", f'must be "demo", a Path, words, or token ids (pos,) or (batch, pos), got {shown(source)}'
        )
    rows = json.dumps((ids if ids.ndim == 2 else ids[None]).tolist())
    return "ids", rows, rows


def _read(path: Path) -> str:
    if found_at(path) is None and os.path.exists(path):  # a job reads its text twice, when it is made and when it runs
        raise ArgumentError("text", f"must be a file, got {shown(str(path))}, which is a device or a pipe")
    try:
        return decode_text(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError("text", f"must be a readable UTF-8 file, got {shown(str(path))}: {why}") from error
