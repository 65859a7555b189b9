"""Which small errors in additive/, rope/ and hooks/ would the tests notice? ``make mutants``, or with some files:

    python tests/support/mutants.py --per-file 5 --seed 1 rope/rotary rope/moments

cosmic-ray says where an operator, number, comparison or condition can be replaced. Of these places some are drawn per
file (``--per-file 0`` takes all: a night), one replacement each, and the tests of that file are run on the package with
it. A mutant is killed by a failing test, an error, or ten times the time; what survives is printed. All happens in a
copy, and every mutant is a fork of one process that has imported torch. Annotations, which nothing reads, are left out.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As `make test` runs them: without what is marked slow, and without checks of annotations.
FAST_LANE = ["-m", "not slow", "-o", "addopts=--doctest-modules"]
# Tests in other folders of files below these.
ELSEWHERE = {
    "additive/attention": ["tests/hooks/test_substitute_attention.py", "tests/experiments/test_attention_ladder.py"],
    "hooks/substitute": ["tests/experiments/test_attention_ladder.py"],
}

# What all functions refuse, in one table.
REFUSALS = "tests/catalogue/test_combinations.py"


def all_files() -> list[str]:
    """Such as ``rope/rotary``."""
    paths = sorted(
        path for room in ("additive", "rope", "hooks") for path in (ROOT / "tl_posdisent" / room).rglob("[a-z]*.py")
    )
    return [path.relative_to(ROOT / "tl_posdisent").with_suffix("").as_posix() for path in paths]


def tests_of(stem: str) -> list[str]:
    """Paths of the tests of a file: its own (tests/ROOM/test_FILE*.py), its examples, its room's, and of refusals."""
    room, name = stem.split("/", 1)
    folder = ROOT / "tests" / room
    own = sorted(path.relative_to(ROOT).as_posix() for path in folder.glob(f"test_{name.replace('/', '_')}*.py"))
    more = [path for place, paths in ELSEWHERE.items() if stem.startswith(place) for path in paths]
    return [*own, f"tl_posdisent/{stem}.py", *more, f"tests/{room}", REFUSALS]


def without_annotations(source: str) -> str:
    """The program as it runs: two sources with the same of these differ in annotations alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def mutants_of(path: Path, number: int, draw: random.Random) -> list[tuple[str, str]]:
    """(operator, source) of some mutants, each of another place."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    source = path.read_text(encoding="utf-8")
    original, tree = without_annotations(source), get_ast(source)
    places: dict[object, list[tuple[str, int]]] = {}
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue  # those have to be configured
        found = (start for node in ast_nodes(tree) for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(found):
            places.setdefault((start, name.split("_")[0]), []).append((name, occurrence))
    kept = []
    for _, variants in draw.sample(sorted(places.items()), len(places)):
        name, occurrence = draw.choice(variants)
        try:
            changed = mutate_code(source, plugins.get_operator(name)(), occurrence)
            if changed is None or without_annotations(changed) == original:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # `is` with a literal
                compile(changed, str(path), "exec")
        except (SyntaxError, AttributeError):  # the latter where cosmic-ray finds `except (A, B)` hard to change
            continue
        kept.append((name, changed))
        if number and len(kept) == number:
            break
    return kept


def seconds_of_tests(tests: list[str], log: Path, limit: float | None) -> tuple[int, float]:
    """Exit status of pytest in a fork, -1 out of time, and the seconds of processor that it took."""
    child = os.fork()
    if child == 0:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 5))
        import pytest

        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *FAST_LANE, *tests]))
        finally:  # or an error at its end would remove the copy, which is the parent's
            os._exit(code)
    begun = time.monotonic()
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return (-1 if code < 0 else code), used.ru_utime + used.ru_stime
        if limit is not None and time.monotonic() - begun > 10 * limit:
            os.kill(child, signal.SIGKILL)  # it sleeps or waits
            limit = None
        time.sleep(0.05)


def try_file(stem: str, number: int, seed: int) -> tuple[int, int]:
    """Killed and tried of one file, in the copy that is the current folder; survivors are printed."""
    path, log = Path("tl_posdisent") / f"{stem}.py", Path("mutant.log")
    source = path.read_text(encoding="utf-8")
    tests = tests_of(stem)
    code, usual = seconds_of_tests(tests, log, None)
    if code:
        sys.stderr.write(f"{stem}: its tests fail as it is\n{log.read_text()[-2000:]}\n")
        return 0, 0
    chosen = mutants_of(path, number, random.Random(f"{seed} {stem}"))
    killed = 0
    for count, (operator, changed) in enumerate(chosen):
        path.write_text(changed, encoding="utf-8")
        # Another time for each, or Python would take the bytecode of the last one for it.
        os.utime(path, (1_000_000_000 + count, 1_000_000_000 + count))
        code, _ = seconds_of_tests(tests, log, 10 + 10 * usual)
        killed += code != 0
        if code == 0:
            lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
            sys.stdout.write("\n".join([f"survived: {stem} ({operator})", *list(lines)[2:]]) + "\n")
    path.write_text(source, encoding="utf-8")
    sys.stdout.write(f"{stem:>13}  {killed:3d} of {len(chosen):3d} killed, {usual:.0f} s of tests\n")
    sys.stdout.flush()
    return killed, len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=all_files(), help="such as rope/rotary; all by default")
    parser.add_argument("--per-file", type=int, default=8, help="mutants per file, 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of one second and one size would be taken for one
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", CI="true")  # CI: Hypothesis draws the same every time
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tl_posdisent", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        os.chdir(folder)
        sys.path[0] = folder
        # What all forks share. The package itself is imported by each of them.
        import hypothesis  # noqa: F401
        import scipy.linalg  # noqa: F401
        import sklearn.covariance  # noqa: F401
        import torch
        import transformer_lens  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        torch.set_num_threads(1)
        results = [try_file(stem, options.per_file, options.seed) for stem in options.files]
        os.chdir(ROOT)
    killed, tried = (sum(column) for column in zip(*results, strict=True))
    sys.stdout.write(f"{killed} of {tried} killed ({killed / max(tried, 1):.0%})\n")
    if not all(count for _, count in results):
        sys.exit("not all files could be tried")


if __name__ == "__main__":
    main()
