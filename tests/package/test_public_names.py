"""The public names: each is there once and has an example; arguments of one meaning have one name."""

from __future__ import annotations

import inspect

import pytest
from support.public import NAMESPACES, public_names

import tl_posdisent

FLAT = 62  # names of `tl_posdisent` itself, its nine namespaces among them

# What an argument is not called -> what it is called.
RENAMED = {
    "n_sink": "sinks",
    "sink": "sinks",
    "burn_in": "sinks",
    "clean_tokens": "tokens",
    "corrupted_tokens": "source",
    "from_tokens": "source",
    "part": "component",
    "axis": "component",
    "n_seeds": "seeds",
}
OTHER_MEANING = {"positional_gradients"}  # whose part is of an encoding


def functions() -> dict[str, inspect.Signature]:
    return {name: inspect.signature(x) for name, x in public_names().items() if inspect.isfunction(x)}


def test_names_are_there_once() -> None:
    public = list(tl_posdisent.__all__)
    assert len(set(public)) == len(public)
    assert not [name for name in public if not hasattr(tl_posdisent, name)]
    assert len(public) <= FLAT, "names that few notebooks use belong to their folder's namespace"
    assert set(NAMESPACES) < set(public)


def test_names_have_an_example() -> None:
    """A result may have it in the function that returns it."""
    documented = {name: x for name, x in public_names().items() if inspect.isfunction(x) or inspect.isclass(x)}
    examples = {name: x.__doc__ or "" for name, x in documented.items() if ">>>" in (x.__doc__ or "")}
    for name, value in documented.items():
        assert value.__doc__, f"{name}: no docstring"
        elsewhere = inspect.isclass(value) and any(name in example for example in examples.values())
        assert name in examples or elsewhere, f"{name}: no example"


@pytest.mark.parametrize("old", RENAMED)
def test_arguments_of_one_meaning_have_one_name(old: str) -> None:
    found = {name for name, signature in functions().items() if old in signature.parameters}
    found -= OTHER_MEANING if old == "part" else set()
    assert not found, f"{old} is called {RENAMED[old]} everywhere"


def test_seeds_are_how_many() -> None:
    """By default; as an argument also which."""
    defaults = {name: x.parameters["seeds"].default for name, x in functions().items() if "seeds" in x.parameters}
    assert [name for name, default in defaults.items() if not (default is None or type(default) is int)] == []


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
    message = rf"^{package} has no '{name}'; did you mean {suggested}\b.*\?$"
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
