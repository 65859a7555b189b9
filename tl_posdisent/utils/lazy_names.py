"""Public names of a package, imported on demand; an attribute that is missing says where it is instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lazy_loader

from tl_posdisent.utils.words import did_you_mean

ROOT = Path(__file__).parents[1]


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names the stub beside ``file`` lists.

    >>> import tl_posdisent
    >>> tl_posdisent.phase_noise
    Traceback (most recent call last):
    AttributeError: tl_posdisent has no 'phase_noise': did you mean 'tl_posdisent.hooks.phase_noise'?
    """
    find, directory, names = lazy_loader.attach_stub(package, file)

    def __getattr__(name: str) -> Any:
        if name in names:
            return find(name)
        # In `from package import name` Python replaces this by its own ImportError, without a suggestion.
        raise AttributeError(f"{package} has no {name!r}{_suggestion(package, name)}")

    return __getattr__, directory, names


def public_name(folder: str, name: str) -> Any:
    """Return a public name of a folder that stands above the caller's: the figure that a result draws of itself.

    Nothing is imported before the result is drawn.

    >>> public_name("viz", "plot_distance").__name__
    'plot_distance'
    """
    stub = ROOT / folder / "__init__.pyi"
    return lazy_loader.attach_stub(f"{ROOT.name}.{folder}", str(stub))[0](name)


def _suggestion(package: str, name: str) -> str:
    if name.startswith("_"):  # copy, inspect and doctest ask every module for such names
        return ""
    places: dict[str, str] = {}  # of a name in several packages, the shortest
    for stub in (ROOT / "__init__.pyi", *sorted(ROOT.glob("*/__init__.pyi"))):
        folder = ".".join((ROOT.name, *stub.parent.relative_to(ROOT).parts))
        for public in lazy_loader.attach_stub(folder, str(stub))[2]:
            places.setdefault(public, f"{folder}.{public}")
    in_package = [x for x, place in places.items() if place.rpartition(".")[0] == package]
    return did_you_mean(name, places.keys() & {name}, in_package, places, shown=places.__getitem__)
