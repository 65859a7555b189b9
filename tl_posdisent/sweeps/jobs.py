"""Jobs of a sweep: frozen descriptions with a hash, for all combinations of models, texts, seeds and experiments."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tl_posdisent import experiments, synthetic
from tl_posdisent.models.loading.load import Backend, check_backend
from tl_posdisent.sweeps.sources import DTYPES, MOST_JOBS, Checkpoint, Text, checkpoint_steps, named, step_of
from tl_posdisent.sweeps.versions import installed_versions
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_seeds, is_integer, refuse_pair, shown
from tl_posdisent.utils.words import did_you_mean


@functools.cache
def experiments_by_name() -> dict[str, Callable[..., Any]]:
    """List the public functions of ``(model, tokens, …)`` that return a table, or a result with ``to_frame()``.

    One that needs a function, such as a metric, is left out: no JSON can give it.

    >>> sorted(experiments_by_name())[:2]
    ['additive_substitution', 'additivity']
    """
    public = {name: getattr(room, name) for room in (experiments, synthetic) for name in room.__all__}
    return {name: x for name, x in public.items() if inspect.isfunction(x) and _gives_table(x)}


def _gives_table(function: Callable[..., Any]) -> bool:
    """Say whether a function makes a table of JSON arguments, by its annotations, strings that are not evaluated."""
    signature = inspect.signature(function)
    result = inspect.unwrap(function).__globals__.get(signature.return_annotation)
    gives_table = signature.return_annotation == "pd.DataFrame" or hasattr(result, "to_frame")
    needs_function = any(p.annotation == "Metric" and p.default is p.empty for p in signature.parameters.values())
    return gives_table and list(signature.parameters)[:2] == ["model", "tokens"] and not needs_function


def experiment_named(name: str) -> Callable[..., Any]:
    """Return the experiment of this name, or raise ValueError."""
    known = experiments_by_name()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ArgumentError("experiment", f"must be one of {', '.join(sorted(known))}, got {shown(name)}{hint}")
    return known[name]


def canonical(arguments: Mapping[str, Any]) -> str:
    """Convert arguments to JSON that is equal for equal arguments, or raise ValueError."""
    plain = {name: list(value) if isinstance(value, range) else value for name, value in arguments.items()}
    try:
        return json.dumps(plain, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "arguments", f"must be numbers, strings, lists or None, as in JSON, got {shown(arguments)}"
        ) from error


def settable(name: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of an experiment that a job may set: all but the model, the tokens and the progress bar.

    >>> list(settable("controlled_distance"))
    ['attention_mask', 'distances', 'layers', 'heads', 'sinks']
    """
    parameters = inspect.signature(experiment_named(name)).parameters
    return {x: p for x, p in parameters.items() if x not in ("model", "tokens", "progress")}


def check_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the arguments as JSON, or raise ValueError, before anything is loaded, for others than it takes."""
    known = settable(name)
    if unknown := [x for x in arguments if x not in known]:
        raise ArgumentError("arguments", f"must be among {', '.join(known)} for {name}, got {shown(unknown)}")
    if missing := [x for x, p in known.items() if p.default is p.empty and x not in arguments]:
        raise ArgumentError("arguments", f"must include {' and '.join(missing)} for {name}, got {shown([*arguments])}")
    _refuse_pairs(arguments)
    return canonical(arguments)


def _refuse_pairs(given: Any) -> None:
    """Refuse a pair of integers as heads, also in interventions: JSON would make it a list, which means other heads."""
    if isinstance(given, Mapping):
        refuse_pair(given.get("heads"))
    if isinstance(given, Mapping | list | tuple):
        for value in given.values() if isinstance(given, Mapping) else given:
            _refuse_pairs(value)


def run_experiment(
    name: str, model: Any, tokens: Any, arguments: Mapping[str, Any], seed: int | None, *, progress: bool = False
) -> pd.DataFrame:
    """Run an experiment, with the seed as it takes it, and return its table."""
    function, given = experiment_named(name), dict(arguments)
    known = inspect.signature(function).parameters
    if "progress" in known:
        given["progress"] = progress
    if seed is not None:
        given |= {"seed": seed} if "seed" in known else {"seeds": [seed]}
    result = function(model, tokens, **given)
    table = result if isinstance(result, pd.DataFrame) else result.to_frame()
    return table if isinstance(table.index, pd.RangeIndex) else table.reset_index()


Experiment = str | tuple[str, Mapping[str, Any]]
Source = str | Path | Text


@dataclass(frozen=True)
class Job:
    """One experiment on one model and one text: small, picklable, and created by ``jobs``.

    Attributes:
        model: ``"demo"``, a model's name, or the path of a folder or file.
        checkpoint: step of a training run in a folder, or revision of a named model.
        weights: hash of the files at the path; empty for names.
        text: the text.
        experiment: name of a public function of ``(model, tokens)``.
        arguments: its other arguments, as JSON.
        seed: its ``seed`` or ``seeds``; None if it takes none.
        backend, dtype: how to load the model.
        versions: of this package, TransformerLens, transformers and torch, which may change the result.

    Example:
        >>> from tl_posdisent.sweeps import jobs
        >>> (job,) = jobs("demo", "additivity", "We hold these truths")
        >>> job.arguments, len(job.hash), job.hash == jobs("demo", ("additivity", {}), ["We hold these truths"])[0].hash
        ('{}', 64, True)
    """

    model: str
    checkpoint: Checkpoint
    weights: str
    text: Text
    experiment: str
    arguments: str
    seed: int | None = None
    backend: Backend = "auto"
    dtype: str = "float32"
    versions: str = field(default_factory=installed_versions)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that determines the result; of files, the content and not the path."""
        what = dataclasses.asdict(self) | {"model": "" if self.weights else self.model, "text": self.text.described()}
        what |= {"arguments": json.loads(self.arguments)}
        return hashlib.sha256(canonical(what).encode("utf-8")).hexdigest()

    @property
    def loads(self) -> tuple[str, Checkpoint, str, str, str]:
        """Identity of the model to load: jobs with equal values share it."""
        return self.model, self.checkpoint, self.weights, self.backend, self.dtype

    def columns(self) -> dict[str, Any]:
        """Return the columns that identify the job in a table."""
        given = {name: getattr(self, name) for name in ("seed", "experiment", "arguments", "backend", "dtype")}
        place = {"model": self.model, "checkpoint": self.checkpoint, "step": step_of(self.checkpoint)}
        return place | {"text": self.text.name} | given | {"job": self.hash}


def jobs(
    models: str | Path | Iterable[str | Path],
    experiments: Experiment | Sequence[Experiment],
    texts: Source | Sequence[Source],
    *,
    checkpoints: Literal["all"] | Iterable[int | str] | None = None,
    seeds: int | Iterable[int] | None = None,
    backend: Backend = "auto",
    dtype: str = "float32",
) -> list[Job]:
    """Create a job for each combination of model, checkpoint, experiment, text and seed.

    Jobs of one model are adjacent. Files of weights and texts are read once, for a hash; a job raises an error if its
    files have changed since then.

    Args:
        models: ``"demo"``, names that ``load_model`` takes, folders or safetensors files (of Hugging Face models, of
            ``save_checkpoint``, of the demo model's training).
        experiments: names of public functions of ``(model, tokens)`` that return a table, or pairs of a name and a dict
            of other JSON-compatible arguments.
        texts: each ``"demo"``, words, a ``Path`` of a UTF-8 file, or a ``Text`` (parts of any of these).
        checkpoints: steps of the training runs in the folders ``models``, or ``"all"`` of them; for names, revisions,
            where an integer ``n`` means ``"stepn"``, as for Pythia. None: the models themselves.
        seeds: for experiments that take ``seed`` or ``seeds``: the number of seeds (0, 1, 2 …), or a list of seeds.
            None for their default. Other experiments run once.
        backend: as in ``load_model``.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.

    Raises:
        ValueError: no combination; a missing folder, checkpoint or file; an unknown experiment; arguments or seeds that
            an experiment does not take.

    Example:
        >>> from tl_posdisent.sweeps import Text, jobs
        >>> todo = jobs("demo", ["additivity"], Text.of("demo", length=64, count=4).split(2))
        >>> [job.text for job in todo]
        [Text demo[0:2]×64, Text demo[2:4]×64]
    """
    check_backend(backend)
    check_choice("dtype", dtype, DTYPES)
    one = isinstance(experiments, tuple)  # a name and its arguments
    asked = [_experiment(x) for x in ([experiments] if one else _listed("experiments", experiments))]
    read = _texts(texts)
    given = None if seeds is None else check_seeds(seeds)
    runs = [(name, check_call(name, arguments), _seeds(name, arguments, given)) for name, arguments in asked]
    if given is not None and all(drawn == [None] for _, _, drawn in runs):
        names = ", ".join(name for name, _ in asked)
        raise ArgumentError("seeds", f"must be None, as none of {names} takes one, got {shown(given)}")
    places = []
    if checkpoints not in (None, "all"):
        checkpoints = _listed("checkpoints", checkpoints)
    for model in _listed("models", models):
        steps = checkpoint_steps(model) if checkpoints == "all" else [None] if checkpoints is None else checkpoints
        places += [named(model, step) for step in _listed("checkpoints", steps)]
    if (count := len(places) * len(read) * sum(len(drawn) for _, _, drawn in runs)) > MOST_JOBS:
        raise ValueError(
            f"models, experiments, texts, checkpoints and seeds must make at most {MOST_JOBS} jobs, got {count}: "
            "call jobs and sweep for parts of them, with one folder"
        )
    found = [
        Job(*place, text, name, arguments, seed, backend, dtype)
        for place, text, (name, arguments, drawn) in itertools.product(places, read, runs)
        for seed in drawn
    ]
    if not found:
        raise ValueError(
            "models, experiments, texts, checkpoints and seeds must each have at least one entry, got none"
        )
    return list(dict.fromkeys(found))


def _experiment(given: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of an experiment."""
    match given:
        case str():
            return given, {}
        case (str() as name, Mapping() as arguments):
            return name, dict(arguments)
    raise ArgumentError("experiments", f"must be names, or pairs of a name and a dict of arguments, got {shown(given)}")


def _seeds(name: str, arguments: Mapping[str, Any], seeds: list[int] | None) -> Sequence[int | None]:
    """Return the seeds of an experiment; one None if it takes none, or if none are given."""
    if seeds is None or not {"seed", "seeds"} & set(settable(name)):
        return [None]
    if {"seed", "seeds"} & set(arguments):
        raise ArgumentError("seeds", f"must be given once, got {shown(seeds)} and {shown(dict(arguments))} for {name}")
    return seeds


def _texts(given: Any) -> list[Text]:
    """Return texts, of which token ids are lists of their own."""
    sources = _listed("texts", given)
    if any(is_integer(x) for x in sources):  # one text of ids, or several?
        raise ArgumentError(
            "texts", f"must be texts or lists of token ids, got {shown(given)}: ids of one text are [[0, 5, 9]]"
        )
    return [x if isinstance(x, Text) else Text.of(x) for x in sources]


def _listed(name: str, given: Any) -> list[Any]:
    """Return a list; a single name, path or text is a list of one."""
    if isinstance(given, str | Path | Text):
        return [given]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise ArgumentError(name, f"must be a list, or a single name or path, got {shown(given)}")
    return list(given)
