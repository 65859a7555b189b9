"""The public names: each is there once and has an example, and a missing one says where it is."""

from __future__ import annotations

import inspect
from functools import reduce
from importlib import import_module

import pytest
from support.imports import sources
from support.public import NAMESPACES, public_names

import tl_posdisent


def test_names_are_there_once() -> None:
    public = list(tl_posdisent.__all__)
    assert len(set(public)) == len(public)
    assert not [name for name in public if not hasattr(tl_posdisent, name)]
    assert set(NAMESPACES) < set(public)


def test_no_public_name_hides_a_folder() -> None:
    """With ``report/`` beside the function ``report``, ``import tl_posdisent.report.build as b`` would fail."""
    for name, path in sources().items():
        if path.name == "__init__.py":
            import_module(".".join(("tl_posdisent", *name)))
            assert inspect.ismodule(reduce(getattr, name, tl_posdisent)), name


def test_names_have_an_example() -> None:
    """A result may have it in the function that returns it."""
    documented = {name: x for name, x in public_names().items() if inspect.isfunction(x) or inspect.isclass(x)}
    examples = {name: x.__doc__ or "" for name, x in documented.items() if ">>>" in (x.__doc__ or "")}
    for name, value in documented.items():
        assert value.__doc__, f"{name}: no docstring"
        elsewhere = inspect.isclass(value) and any(name in example for example in examples.values())
        assert name in examples or elsewhere, f"{name}: no example"


@pytest.mark.parametrize(
    ("package", "name", "suggested"),
    [
        ("tl_posdisent", "applied", "tl_posdisent.hooks.applied"),
        ("tl_posdisent", "fit_aditive", "tl_posdisent.fit_additive"),
        ("tl_posdisent", "Rotery", "tl_posdisent.rope.Rotary"),
        ("tl_posdisent.hooks", "phase_nois", "tl_posdisent.hooks.phase_noise"),
        ("tl_posdisent.rope", "additivity", "tl_posdisent.additivity"),
    ],
)
def test_a_missing_name_says_where_it_is(package: str, name: str, suggested: str) -> None:
    message = rf"^{package} has no '{name}': did you mean '{suggested}'\?$"
    namespace = tl_posdisent if package == "tl_posdisent" else getattr(tl_posdisent, package.split(".")[1])
    with pytest.raises(AttributeError, match=message):
        getattr(namespace, name)
    with pytest.raises(ImportError, match=rf"^cannot import name '{name}' from '{package}'"):
        exec(f"from {package} import {name}")


def test_a_name_like_no_other_is_missing_too() -> None:
    assert not hasattr(tl_posdisent, "nothing_of_the_kind")
    with pytest.raises(AttributeError, match=r"^tl_posdisent has no 'nothing_of_the_kind'$"):
        _ = tl_posdisent.nothing_of_the_kind
    from tl_posdisent import cli, utils  # noqa: F401 - folders are importable although no public names
