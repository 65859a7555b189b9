"""``models``: list names for ``--model``, offline."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from tl_posdisent.cli.options import Out
from tl_posdisent.cli.output import answering, check_out, grid, save, show
from tl_posdisent.utils.words import plural

_STATUS = {0: "untested", 1: "tested", 2: "skipped", 3: "fails", 4: "in part"}


def models(
    search: Annotated[str | None, Option(help="Only names and architectures that contain this.")] = None,
    untested: Annotated[
        bool, Option("--untested", help="Also names that TransformerLens lists but has not tested.")
    ] = False,
    out: Out = None,
) -> None:
    """List names for --model: demo, smollm2 and gemma3-270m (from Python packages), and those of TransformerLens.

    Columns:
      name           name for --model
      hooked         yes, if HookedTransformer supports it
      bridge         status in TransformerLens's list: tested, untested, fails …
      architecture   the class in transformers, if TransformerLens lists it

    Examples:
      tl-posdisent models --search pythia
      tl-posdisent models --untested --out models.csv
    """
    with answering():
        check_out(out)
        table = _known_models()
        if not untested:
            table = table[(table["bridge"] == "tested") | (table["hooked"] == "yes")]
        if search is not None:
            table = table[(table["name"] + " " + table["architecture"]).str.contains(search, case=False, regex=False)]
        if not len(table):
            hint = "" if untested else "; more are listed with --untested"
            raise ValueError(f"no model matches{hint}. --model also takes a directory with config.json and safetensors")
        save(table, out)
    lines = grid("models", dict.fromkeys(table.columns, False), table.to_numpy().tolist())
    show([*lines, plural(len(table), "model")])


def _known_models() -> Any:
    """List one row per name, sorted, with the demo model and those of Python packages first."""
    import pandas as pd
    from transformer_lens.supported_models import OFFICIAL_MODEL_NAMES
    from transformer_lens.tools.model_registry.api import get_supported_models

    from tl_posdisent.models.loading.load import has_hooked
    from tl_posdisent.models.loading.packaged import PACKAGED

    hooked = set(OFFICIAL_MODEL_NAMES) if has_hooked() else set()
    bridged = {entry.model_id: entry for entry in get_supported_models()}
    own = {"demo": "LlamaForCausalLM"} | {name: packaged.architecture for name, packaged in PACKAGED.items()}
    both = "yes" if has_hooked() else "–", "tested"
    found = [(name, *both, architecture) for name, architecture in own.items()]
    for name in sorted(hooked | bridged.keys(), key=lambda name: (name.lower(), name)):
        entry = bridged.get(name)
        architecture = entry.architecture_id if entry else "–"
        status = _STATUS.get(entry.status, "–") if entry else "–"
        found.append((name, "yes" if name in hooked else "–", status, architecture))
    return pd.DataFrame(found, columns=["name", "hooked", "bridge", "architecture"])
