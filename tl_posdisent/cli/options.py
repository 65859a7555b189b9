"""Options that several commands share, the model and text that they name, and ``command``, which adds the options."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Option

from tl_posdisent.cli.output import QUIET, answering, check_out, note
from tl_posdisent.cli.process import collecting_late, settle
from tl_posdisent.utils.files import found_at


def read_text(text: Path | None, model: str, option: str = "text") -> str:
    """Read a text from a file, from stdin (``-``) or, for ``demo``, the packaged one, with line ends ``\\n``.

    The packaged text is also the default; a note says so for models other than the demo model.
    """
    if text is None or str(text) == "demo":
        if text is None and model != "demo":
            note("text: the demo text; --text names another")
        from tl_posdisent.demo.demo_model import demo_text

        return demo_text()
    name = "stdin" if str(text) == "-" else str(text)
    try:
        if name == "stdin" and sys.stdin is None:
            raise OSError("stdin is closed")
        with contextlib.nullcontext(sys.stdin.buffer) if name == "stdin" else text.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"--{option} cannot be read: {error}") from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"--{option} must have at most {_MOST_BYTES // 10**6} MB, but {name} has more")
    try:
        words = io.StringIO(content.decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"--{option} must be UTF-8, but {name} is not ({byte}); convert it, e.g. by iconv") from error
    if not words.strip():
        raise ValueError(f"--{option} must have words, but {name} is empty")
    return words


def name_of(model: str) -> str:
    """Return the name of a model for titles: its own, or that of its folder or file."""
    return (Path(model).resolve().name or model) if found_at(model) else model


def check_model(model: str) -> None:
    """Raise for an unknown model, before anything else is done and without asking a hub."""
    if (Path(model).is_absolute() or model.startswith(".")) and not found_at(model):
        raise ValueError(f"--model {model}: no such directory or file")
    if model != "demo":
        from tl_posdisent.models.loading.names import check_model_name

        check_model_name(model)


def load(model: str, *, backend: str, device: str | None, dtype: str) -> Any:
    """Load a model that has a tokenizer."""
    import torch

    from tl_posdisent.demo.demo_model import load_demo_model
    from tl_posdisent.models.loading.load import check_device, load_model

    kind: torch.dtype = getattr(torch, dtype)
    make = load_demo_model if model == "demo" else partial(load_model, model, dtype=kind)
    place = check_device(device)
    try:
        loaded: Any = make(backend=backend, device=place)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        names = "" if found_at(model) else " (tl-posdisent models lists known names)"
        raise ValueError(f"--model {model}: {error}{names}") from error
    if model == "demo" and kind != torch.float32:
        loaded = loaded.to(kind)  # its weights are stored in float16, and loaded as float32
    if getattr(loaded, "tokenizer", None) is None:
        raise ValueError(f"--model {model} has no tokenizer, so it cannot read text")
    settle(loaded)
    return loaded


def _quiet(progress: bool) -> bool:
    """Turn off notes, and progress bars of other libraries, which read the environment when they are imported later."""
    if not progress:
        os.environ.update({QUIET: "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    return progress


@dataclass
class Given:
    """Values of the shared options, declared here in the order in which the help lists them."""

    model: str = Option(
        "demo",
        metavar="demo|NAME|PATH",
        help="A name such as smollm2 (see 'models'), a directory, or a GGUF file.",
        autocompletion=lambda: ["demo", "smollm2", "gemma3-270m"],  # shells complete paths themselves
    )
    text: Path | None = Option(
        None, metavar="demo|FILE|-", allow_dash=True, help="UTF-8 text, - for stdin; default the demo text."
    )
    out: Path | None = Option(None, help="File for the whole table: .csv, .parquet or .json.")
    backend: Literal["auto", "hooked", "bridge"] = Option(
        "auto", help="HookedTransformer, TransformerBridge, or the first that is supported."
    )
    device: str | None = Option(
        None, help="cpu, cuda, cuda:1 …; default the CPU, or for a NAME TransformerLens's default."
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Option("float32", help="Dtype of the weights.")
    length: int | None = Option(None, min=2, help="Tokens per text; default all, at most the context and 512.")
    texts: int = Option(1, min=1, help="Number of consecutive parts of the text.")
    layers: str | None = Option(None, help="Such as 0,3,5 or 0-3,7, or global or local; default all.")
    heads: str | None = Option(None, help="Heads of these layers, such as 0,2-4, or L4H2,L0H5; default all.")
    control: int = Option(1, min=0, help="Number of random initialisations for the baseline, from --seed on.")
    std: str = Option(
        "config", metavar="config|NUMBER", help="Standard deviation of their weights; config: the model's own value."
    )
    seed: int = Option(0, min=0, help="Random seed.")
    progress: bool = Option(True, callback=_quiet, help="Progress bars and notes on stderr, or only errors.")

    def __post_init__(self) -> None:
        check_model(self.model)
        check_out(self.out)
        self.chosen_layers, self.chosen_heads = layer_numbers(self.layers), head_numbers(self.heads)
        self.chosen_std = standard_deviation(self.std)
        self.exit_code = 0

    def load(self) -> Any:
        return load(self.model, backend=self.backend, device=self.device, dtype=self.dtype)

    def read(self) -> tuple[Any, Any, str]:
        """Load the model and token ids ``[texts, length]``, and describe both for titles."""
        words = read_text(self.text, self.model)
        model = self.load()
        from tl_posdisent.sweeps.sources import cut

        longest = min(int(model.cfg.n_ctx), 512, max(2, cut(model, words, None).shape[1] // max(1, self.texts)))
        length = self.length or longest
        if not self.texts:  # two, if the text is long enough
            try:
                tokens = cut(model, words, length, 2)
            except ValueError:
                tokens = cut(model, words, length)
        else:
            tokens = cut(model, words, length, self.texts)
        return model, tokens, f"{name_of(self.model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens"


_MOST = 1_000_000  # of any option that is a number of things: a larger one is a mistake, and would fill the memory
_MOST_LISTED = 100_000
_MOST_BYTES = 100_000_000  # of a text, which is tokenized whole
ON_TEXT = "model text out backend device dtype length texts"  # for commands that measure a model on a text


def command(shared: str) -> Callable[[Callable[..., list[str]]], Callable[..., None]]:
    """Turn a function of ``Given`` and its own options, which returns lines to print, into a typer command.

    The command's options are the ``shared`` ones and the function's other parameters, which replace shared options of
    the same name. An error is printed on one line, with an exit code, before any results.
    """
    declared = inspect.signature(Given, eval_str=True).parameters
    defaults = {name: option.default.default for name, option in declared.items()}
    places = {name: n for n, name in enumerate(declared)}
    alone = places["heads"] + 0.5  # own options follow those that select what is measured

    def decorate(work: Callable[..., list[str]]) -> Callable[..., None]:
        own = {name: p for name, p in inspect.signature(work, eval_str=True).parameters.items() if name != "given"}
        common = {name: declared[name] for name in shared.split() if name not in own}
        for option in (common | own).values():
            if option.annotation in (int, int | None) and option.name != "seed":
                option.default.max = option.default.max or _MOST
        options = sorted((common | own).values(), key=lambda option: places.get(option.name, alone))

        @functools.wraps(work)
        def run(**values: Any) -> None:
            with answering(values), collecting_late():
                given = Given(**defaults | {name: values[name] for name in common})
                lines = work(given, **{name: values[name] for name in own})
            sys.stdout.write("\n".join(lines) + "\n")
            if given.exit_code:
                raise typer.Exit(given.exit_code)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def whole_numbers(option: str, text: str | None) -> list[int] | None:
    """Parse ``"0,3-5"`` to ``[0, 3, 4, 5]``; None stays None.

    >>> whole_numbers("layers", "0,3-5")
    [0, 3, 4, 5]
    >>> whole_numbers("layers", "5-3")
    Traceback (most recent call last):
        ...
    ValueError: --layers must be numbers or ranges such as 0-3, separated by commas, got '5-3'
    """
    if text is None:
        return None
    if re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        pairs = [part.partition("-")[::2] for part in text.split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, last in pairs]
        if (count := sum(map(len, ranges))) > _MOST_LISTED:
            raise ValueError(f"--{option} must be at most {_MOST_LISTED} numbers, got {count}")
        if all(ranges):
            return [number for found in ranges for number in found]
    raise ValueError(f"--{option} must be numbers or ranges such as 0-3, separated by commas, got {text!r}")


def layer_numbers(text: str | None) -> list[int] | Literal["global", "local"] | None:
    """Parse ``--layers``: numbers as in ``whole_numbers``; ``"global"`` and ``"local"`` stay unchanged.

    >>> layer_numbers("0,3-5"), layer_numbers("local")
    ([0, 3, 4, 5], 'local')
    """
    match text:
        case "global" | "local":
            return text
        case _:
            return whole_numbers("layers", text)


def standard_deviation(text: str) -> float | Literal["config"]:
    """Parse ``--std`` to a number; ``"config"`` stays unchanged.

    >>> standard_deviation("0.02"), standard_deviation("config")
    (0.02, 'config')
    """
    if text == "config":
        return "config"
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"--std must be a number above 0, or config, got {text!r}")
    return number


def head_numbers(text: str | None) -> list[Any] | None:
    """Parse ``"L4H2,L0H5"`` to labels that the library takes, or numbers of heads as in ``whole_numbers``.

    >>> head_numbers("L4H2,L0H5"), head_numbers("0,2-4")
    (['L4H2', 'L0H5'], [0, 2, 3, 4])
    """
    if text is not None and re.fullmatch(r"L\d{1,6}H\d{1,6}(,L\d{1,6}H\d{1,6})*", text):
        return text.split(",")
    return whole_numbers("heads", text)


def numbers(option: str, text: str) -> list[float]:
    """Parse ``"0,0.1,1"`` to numbers."""
    try:
        return [float(x) for x in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{option} must be numbers separated by commas, got {text!r}") from error


def repeated(known: Sequence[str]) -> Any:
    """Create an option that may be given several times, each time with one of the ``known`` values."""
    described = f"{', '.join(known)}; may be repeated; default all."
    return Option(None, help=described, autocompletion=lambda: [*known])


def one_of(option: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Validate the values of an option that may be repeated, and drop duplicates; None is all."""
    for word in given or known:
        if word not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, got {word!r}")
    return list(dict.fromkeys(given or known))
