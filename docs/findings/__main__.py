"""The numbers behind the page of results, for one model and one source of texts:

    python docs/findings smollm2 demo                        # all studies; see ``make findings``
    python docs/findings gemma3-270m speeches ceilings       # some of them
    python docs/findings demo speeches perturbation          # of the package's demo model

Each study yields rows; ``tables/MODEL_SOURCE.csv`` has those of all studies, and a study that runs again replaces its
own. Studies: see ``STUDIES``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import heads
import pairing
import pandas as pd
import positions
import robustness
import scores
import torch
from rows import Row, Study
from texts import SOURCES

import tl_posdisent as tp

FOLDER = Path(__file__).with_name("tables")
MODULES = (scores, pairing, positions, heads, robustness)
STUDIES: dict[str, Study] = {name: getattr(module, name) for module in MODULES for name in module.STUDIES}


def write(path: Path, study: str, rows: list[Row]) -> None:
    """Replace the rows of a study in a table."""
    new = pd.DataFrame(rows).round(4)
    new.insert(0, "study", study)
    if path.exists():
        old = pd.read_csv(path)
        new = pd.concat([old[old["study"] != study], new])
    order = list(STUDIES)
    new = new.sort_values("study", key=lambda names: names.map(order.index), kind="stable")
    new.to_csv(path, index=False)


def main(name: str, source: str, *wanted: str) -> None:
    """Run studies, print their rows and write them."""
    if source not in SOURCES or (unknown := set(wanted) - set(STUDIES)):
        sys.exit(f"texts must be one of {', '.join(SOURCES)}; studies of {', '.join(STUDIES)}; got {unknown or source}")
    FOLDER.mkdir(exist_ok=True)
    model = tp.load_demo_model() if name == "demo" else tp.load_model(name)
    for study in wanted or STUDIES:
        start, rows = time.monotonic(), []
        for each in STUDIES[study](model, source):
            rows.append(each)
            spread = "" if each.error != each.error else f" ± {each.error:.3f}"
            print(f"{study}: {each.name}: {each.value:.3f}{spread} ({each.over} of {each.length})", flush=True)
        write(FOLDER / f"{name}_{source}.csv", study, rows)
        print(f"{study}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(torch.get_num_threads())
    main(*sys.argv[1:])
