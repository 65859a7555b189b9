"""Run studies: each is a file of this folder, named after the finding, the table or the picture that it makes.

    python docs/studies --list                    # all studies, one line each
    python docs/studies idle copying              # tables of SmolLM2: tables/smollm2/
    python docs/studies where_or_what_exact --model gemma3-270m
    python docs/studies perturbation --model demo --texts speeches
    python docs/studies findings --texts demo --out out/findings   # as ``make findings``
    python docs/studies figures heads             # docs/figures/heads.svg
    python docs/studies deposit_small FOLDER      # a study of models that it trains, with a folder for them

``findings`` are all studies with numbers on the page of results; a study that runs again replaces its rows of
``tables/MODEL_TEXTS.csv``. With ``--out`` the table is written there, and the page with its numbers beside it.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from shared import running
from shared.texts import SOURCES


def main() -> None:
    """Run the studies that the command line names."""
    parser = ArgumentParser(prog="python docs/studies")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a study; then arguments of it, if it has any")
    parser.add_argument("--list", action="store_true", help="list the studies, one line each")
    parser.add_argument("--model", default="smollm2", help="demo, smollm2, gemma3-270m, or any that load_model takes")
    parser.add_argument("--texts", default="speeches", choices=SOURCES, help="of the findings")
    parser.add_argument("--out", type=Path, help="folder of the findings' table, and of the page with its numbers")
    chosen, known = parser.parse_args(), running.first_lines()
    if chosen.list:
        print(*(f"{name:28} {sentence}" for name, sentence in known.items()), sep="\n")
    elif chosen.names[:1] and chosen.names[0] not in {"findings", *known}:
        parser.error(f"{chosen.names[0]} is no study; --list shows them")
    else:
        running.run(chosen.names, chosen.model, chosen.texts, chosen.out)


if __name__ == "__main__":
    main()
