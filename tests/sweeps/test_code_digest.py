"""A result of an earlier version of a function is refused, and one of the same code is taken."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.processes import run

from tl_posdisent.sweeps import sweep
from tl_posdisent.sweeps.code_digest import code_digest
from tl_posdisent.utils.errors import ArgumentError

BEGIN = """
from functools import lru_cache, partial, wraps
from numpy import arange
from pandas import DataFrame

def times(factor, also=None):
    def decorate(f):
        @wraps(f)
        def run(*arguments, **named):
            return f(*arguments, **named) * (factor if also is None else 5)
        return run
    return decorate

def doubled(f):
    @wraps(f)
    def run(*arguments, **named):
        return f(*arguments, **named) + f(*arguments, **named)
    return run

def counted(f):
    calls, all, seen = 0, [], {}
    @wraps(f)
    def run(*arguments, **named):
        nonlocal calls
        calls += 1
        all.append(calls)
        seen[calls] = f(*arguments, **named)
        return seen[calls]
    return run

@lru_cache
def cached(x):
    return x

"""
SAME = [
    "def job(n=1): return DataFrame({'a': [n]})",
    "\n\n# a comment\ndef job(n = 1):\n    # another one\n    return DataFrame( {'a': [n]} )",
]
OTHERS = {
    "body": "def job(n=1): return DataFrame({'a': [n + 1]})",
    "constant": "def job(n=1): return DataFrame({'b': [n]})",
    "called by name": "def job(n=1): return DataFrame.from_dict({'a': [n]})",
    "default": "def job(n=2): return DataFrame({'a': [n]})",
    "type of the default": "def job(n=True): return DataFrame({'a': [n]})",
    "list as default": "def job(n=[1]): return DataFrame({'a': n})",
    "function as default": "def job(n=times): return DataFrame({'a': [1]})",
    "named default": "def job(*, n=1): return DataFrame({'a': [n]})",
    "decorator": "@doubled\ndef job(n=1): return DataFrame({'a': [n]})",
    "other decorator": "@times(2)\ndef job(n=1): return DataFrame({'a': [n]})",
    "argument of the decorator": "@times(3)\ndef job(n=1): return DataFrame({'a': [n]})",
    "numbers for the decorator": "@times(2, (1,))\ndef job(n=1): return DataFrame({'a': [n]})",
    "function with a cache": "@times(2, cached)\ndef job(n=1): return DataFrame({'a': [n]})",
    "two decorators": "@doubled\n@times(3)\ndef job(n=1): return DataFrame({'a': [n]})",
    "two decorators in another order": "@times(3)\n@doubled\ndef job(n=1): return DataFrame({'a': [n]})",
    "function inside": "def job(n=1): return DataFrame({'a': [*map(lambda x: x, [n])]})",
    "function inside, changed": "def job(n=1): return DataFrame({'a': [*map(lambda x: -x, [n])]})",
    "words of a set": "def job(n=1): return DataFrame({'a': [n in {'a', 'b'}]})",
    "other words of a set": "def job(n=1): return DataFrame({'a': [n in {'a', 'c'}]})",
    "error that is caught": "def job(n=1):\n    try: return DataFrame({'a': [n]})\n    except ValueError: raise",
    "calls itself": "def job(n=1): return DataFrame({'a': [n]}) if n else job(1)",
    "array as default": "def job(n=arange(9000)): return DataFrame({'a': [1]})",
    "another number in its middle": "def job(n=arange(9000) + (arange(9000) == 4500)): return DataFrame({'a': [1]})",
    "two names": "def job(n=1, m=1): return DataFrame({'a': [n]})",
}


def made(text: str, name: str = "job") -> Any:
    """A function of a module, as its file is read after a change."""
    module = ModuleType("versions")
    exec(BEGIN + text, vars(module))
    return vars(module)[name]


@pytest.mark.parametrize("other", ["body", "default", "decorator", "argument of the decorator"])
def test_another_version_of_a_function_is_refused(other: str, tmp_path: Path) -> None:
    """Whichever was first; with the name of the job, and what to do."""
    for first, second in ((SAME[0], OTHERS[other]), (OTHERS[other], SAME[0])):
        path = tmp_path / str(first == SAME[0]) / "one.parquet"
        sweep({"one": made(first)}, path.parent, progress=False)
        before = path.read_bytes()
        with pytest.raises(ArgumentError, match=r"jobs must be .* in out, got 'one' as versions.job\(\)") as caught:
            sweep({"two": made(first), "one": made(second)}, path.parent, progress=False)
        assert "the function, a default or a decorator of it has changed since" in str(caught.value)
        assert f"{path} was made: choose another name or folder" in str(caught.value)
        assert path.read_bytes() == before
        assert [*path.parent.iterdir()] == [path]


def test_the_same_code_is_taken(tmp_path: Path) -> None:
    """With other comments, on other lines."""
    first, *again = (sweep({"one": made(text)}, tmp_path, progress=False) for text in (*SAME, "\n" + SAME[0]))
    assert all(table.equals(first) for table in again)


def test_versions_are_told_apart() -> None:
    """And each is equal to itself when it is read again."""
    texts = [SAME[0], *OTHERS.values()]
    digests = [code_digest(made(text)) for text in texts]
    assert len({*digests}) == len(texts)
    assert [code_digest(made("\n# moved\n" + text)) for text in texts] == digests


def test_one_call_in_other_words_is_the_same_code(tmp_path: Path) -> None:
    job = made("def job(n, m=1, f=None, g=None): return DataFrame({'a': [n + m]})")
    f, g = made(SAME[0]), made(OTHERS["body"])
    for way in (partial(job, 2, 1, f, g), partial(job, f=f, g=g, m=np.int64(1), n=2), partial(job, 2, 1, g=g, f=f)):
        sweep({"one": way}, tmp_path, progress=False)
    with pytest.raises(ArgumentError, match="has changed since"):
        sweep({"one": partial(job, 2, 1, g, f)}, tmp_path, progress=False)


def test_what_a_decorator_counts_and_keeps_is_no_change(tmp_path: Path) -> None:
    """Nor is what a function with a cache has kept."""
    for n, text in enumerate(["@counted\n" + SAME[0], "@times(2, cached)\n" + SAME[0]]):
        job = made(text)
        first, again = (sweep({"one": job}, tmp_path / f"{n}", progress=False) for _ in range(2))
        assert first.equals(again)
        sweep({"one": made(text)}, tmp_path / f"{n}", progress=False)


def test_functions_that_are_arguments_are_code_too(tmp_path: Path) -> None:
    texts = [f"def measure(): return {n}\ndef job(f): return DataFrame({{'a': [f[0]()]}})" for n in (1, 2)]
    jobs = [{"one": partial(made(text), [made(text, "measure")])} for text in texts]
    assert sweep(jobs[0], tmp_path, progress=False)["a"].tolist() == [1]
    with pytest.raises(ArgumentError, match="has changed since"):
        sweep(jobs[1], tmp_path, progress=False)


def test_an_edited_file_is_not_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is edited while it is in use keeps its results; those are of the former code when it is read."""
    file, out = tmp_path / "edited.py", tmp_path / "out"
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text(BEGIN + SAME[0], encoding="utf-8")
    import edited

    file.write_text(BEGIN + OTHERS["body"], encoding="utf-8")
    assert sweep({"one": edited.job}, out, progress=False)["a"].tolist() == [1]
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), vars(edited))
    with pytest.raises(ArgumentError, match="has changed since"):
        sweep({"one": edited.job}, out, progress=False)
    monkeypatch.delitem(sys.modules, "edited")


def test_it_is_equal_in_every_process() -> None:
    """Sets of words have another order in each."""
    code = f"""
from tl_posdisent.sweeps.code_digest import code_digest
names = {{}}
exec({BEGIN.replace("from pandas import DataFrame", "")!r} + {OTHERS["words of a set"]!r}, names)
print(code_digest(names["times"](object())(names["job"])))
from beartype import beartype
class Table: pass
def checked(n: int = 1) -> Table: return n
print(code_digest(beartype(checked)))
"""
    found = {run(sys.executable, "-c", code, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2", "3")}
    assert len(found) == 1


GIVING = """
def given(f):
    @wraps(f)
    def run(name, *, n):
        return f(name, len(name), n)
    return run

@given
def job(name, size, n): return DataFrame({'a': [size * n]})
"""


def test_a_decorator_may_take_other_arguments_than_its_function(tmp_path: Path) -> None:
    """As one that loads a model by its name."""
    call = partial(made(GIVING), "ab", n=3)
    assert sweep({"one": call}, tmp_path, progress=False)["a"].tolist() == [6]
    assert sweep({"one": call}, tmp_path, progress=False)["a"].tolist() == [6]
    for bad in (partial(made(GIVING), "ab"), partial(made(GIVING), "ab", 3)):
        with pytest.raises(ArgumentError, match="must be calls that can be made, got 'one'"):
            sweep({"one": bad}, tmp_path, progress=False)


def test_a_function_of_no_file_has_the_same_name_on_every_line(tmp_path: Path) -> None:
    """IPython numbers its lines."""
    for line in (1, 2):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(BEGIN + SAME[0], f"<ipython-input-{line}-ab>", "exec"), names)
        assert sweep({"one": names["job"]}, tmp_path, progress=False)["a"].tolist() == [1]
