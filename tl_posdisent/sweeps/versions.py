"""The versions with which a job computes its result."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_RUNS_MODELS = ("transformer-lens", "transformers", "torch")


@functools.cache
def installed_versions() -> str:
    """Describe all versions that may change a result: of this package, of its sources, and of what runs the models.

    The build of torch, such as ``+cpu``, is left out: it changes rounding only, as the device does.

    >>> installed_versions()
    'tl-posdisent 0... (sources ...), transformer-lens ..., transformers ..., torch 2...'
    """
    numbers = {name: version(name).partition("+")[0] for name in ("tl-posdisent", *_RUNS_MODELS)}
    numbers["tl-posdisent"] += f" (sources {digest_of(_PACKAGE)})"
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def digest_of(package: Path) -> str:
    """Return a digest of a folder's Python files, because a checkout keeps its version while its code changes.

    It takes 10 to 30 ms for this package, once in a process.
    """
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(
            f"{file.relative_to(package).as_posix()}:{hashlib.sha256(file.read_bytes()).hexdigest()};".encode()
        )
    return digest.hexdigest()[:12]
