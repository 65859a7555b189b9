"""Names of models: those that cannot be meant are refused before anything is imported or looked for."""

from __future__ import annotations

import difflib
from pathlib import Path

from tl_posdisent.models.loading.packaged import PACKAGED
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import found_at

NEEDED = "must be the folder of a model, or a model's name, got"


def check_name(argument: str, name: str | Path, *, shell: bool = False) -> None:
    """Refuse a path where there is no folder, and a misspelt or cut name of a packaged model: to look for it is slow.

    No repository and no short name of TransformerLens is so near to these; ``google/gemma-3-270m`` is near another.

    Args:
        shell: the command line calls the demo model ``demo``, Python ``load_demo_model()``.

    >>> check_name("name_or_dir", "~/models/llama")
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: name_or_dir must be the folder of a model, ..., got '~/models/llama', where
    no folder is: write ~ as Path.home()
    """
    path = str(name)
    if path in PACKAGED or (shell and path == "demo") or found_at(path) == "folder":
        return
    if isinstance(name, Path) or path.startswith(("/", ".", "~")):
        home = ": write ~ as Path.home()" if path.startswith("~") else ""
        raise ArgumentError(argument, f"{NEEDED} {brief(name)}, where no folder is{home}")
    short = {"smollm2": "'smollm2'", "demo": "'demo'" if shell else "load_demo_model()"}
    begun = [repr(packaged) for packaged in PACKAGED if path and packaged.startswith(path.lower())]
    near = [short[found] for found in difflib.get_close_matches(path.lower(), short, 1, 0.85)]
    if meant := begun or near:
        raise ArgumentError(argument, f"cannot be {brief(path)}: did you mean {meant[0]}?")
