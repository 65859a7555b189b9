"""The numbers behind the page of results, for one model and one source of texts:

    python docs/findings smollm2 demo                        # all studies; see ``make findings``
    python docs/findings gemma3-270m speeches concentration  # some of them
    python docs/findings demo speeches perturbation          # of the package's demo model

Each study yields rows; ``tables/MODEL_SOURCE.csv`` has those of all studies, and a study that runs again replaces its
own. With ``--out FOLDER`` the table is written there, and the page with its numbers beside it. Studies: see
``STUDIES``.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import concentration
import far_distance
import heads
import layer_tolerance
import length
import page
import positions
import robustness
import scores
import static_heads
import torch
from rows import Row, Study, write
from texts import SOURCES, Source, digest, parts

import tl_posdisent as tp

FOLDER = Path(__file__).with_name("tables")
MODULES = (scores, concentration, far_distance, positions, heads, robustness, layer_tolerance, static_heads, length)
STUDIES: dict[str, Study] = {name: getattr(module, name) for module in MODULES for name in module.STUDIES}
ORDER = ["texts", *STUDIES]


def main(name: str, source: Source, wanted: list[str], folder: Path) -> None:
    """Run studies, print their rows and write them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{source}.csv"
    model = tp.load_demo_model() if name == "demo" else tp.load_model(name)
    write(path, "texts", [of_texts(model, source, length) for length in (256, 1024)], ORDER)
    for study in wanted:
        start, rows = time.monotonic(), []
        for each in STUDIES[study](model, source):
            rows.append(each)
            spread = "" if each.error != each.error else f" ± {each.error:.3f}"
            print(f"{study}: {each.name}: {each.value:.3f}{spread} ({each.over} of {each.length})", flush=True)
        write(path, study, rows, ORDER)
        print(f"{study}: {time.monotonic() - start:.0f} s", flush=True)


def of_texts(model: Any, source: Source, length: int) -> Row:
    """How many texts of a length there are, at most eight, and the hash of their ids."""
    texts = parts(model, source, 8, length)
    said = digest(texts)
    print(f"{len(texts)} texts of {length} tokens, SHA-256 of the ids {said} …")
    return Row("texts", len(texts), torch.nan, "", length, f"SHA-256 of the ids {said} …")


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("studies", nargs="*", metavar="study", help=f"default all: {', '.join(STUDIES)}")
    parser.add_argument("--out", type=Path, help="folder of the table, and of the page with its numbers")
    given = parser.parse_args()
    if unknown := set(given.studies) - set(STUDIES):
        parser.error(f"studies must be some of {', '.join(STUDIES)}, got {', '.join(sorted(unknown))}")
    main(given.model, given.source, given.studies or list(STUDIES), given.out or FOLDER)
    if given.out:
        (given.out / "results.md").write_text(page.page(given.out), encoding="utf-8")
