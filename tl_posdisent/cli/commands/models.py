"""Commands about models, without a text: ``models`` (names for ``--model``, offline) and ``check``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from tl_posdisent.cli.inputs import check_name, load, name_of
from tl_posdisent.cli.options import MOST, Backend, Device, Dtype, Model, Out, Progress, Seed
from tl_posdisent.cli.output import answering, check_out, frame, save, show
from tl_posdisent.utils.words import plural

_STATUS = {0: "untested", 1: "tested", 2: "skipped", 3: "fails", 4: "in part"}


def models(
    search: Annotated[str | None, Option(help="Only names and architectures that contain this.")] = None,
    untested: Annotated[
        bool, Option("--untested", help="Also names that TransformerLens lists but has not tested.")
    ] = False,
    out: Out = None,
) -> None:
    """List names for --model: demo, smollm2 (from a Python package), and models of the installed TransformerLens.

    Columns:
      name           name for --model
      hooked         yes, if HookedTransformer supports it
      bridge         status in TransformerLens's list: tested, untested, fails …
      architecture   the class in transformers, if TransformerLens lists it

    Examples:
      tl-posdisent models --search pythia
      tl-posdisent models --untested --out models.csv
    """
    with answering(locals()):
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
    show([*frame(table, "models"), plural(len(table), "model")])


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
    for name in sorted(hooked | bridged.keys(), key=str.lower):
        entry = bridged.get(name)
        architecture = entry.architecture_id if entry else "–"
        status = _STATUS.get(entry.status, "–") if entry else "–"
        found.append((name, "yes" if name in hooked else "–", status, architecture))
    return pd.DataFrame(found, columns=["name", "hooked", "bridge", "architecture"])


def check(
    model: Model = "demo",
    out: Out = None,
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Annotated[int, Option(min=2, max=MOST, help="Tokens per text.")] = 24,
    every_layer: Annotated[
        bool, Option("--every-layer", help="All layers, not only the first two of each kind.")
    ] = False,
    seed: Seed = 0,
    progress: Progress = True,
) -> None:
    """Test every tool on a model: on short, long and padded texts, and with a KV cache.

    The exit code is 1 if a tool returns a wrong result; please report the table then.

    Columns:
      tool      the function
      text      its length, padded, or token by token (KV cache)
      verdict   works, refused or wrong
      error     largest relative error in the tool's laws
      reason    error message, or the law that fails

    Examples:
      tl-posdisent check
      tl-posdisent check --model EleutherAI/pythia-70m --dtype bfloat16
    """
    with answering(locals()):
        check_name(model)
        check_out(out)
        from tl_posdisent.experiments.model_check import check_model

        loaded = load(model, backend, device, dtype)
        table = check_model(loaded, every_layer=every_layer, lengths=length, seed=seed, progress=progress)
        save(table, out)
        counts = table["verdict"].value_counts()
        short = table.assign(error=[f"{x:.0e}" for x in table["error"]], reason=table["reason"].str.slice(0, 80))
        lines = frame(short, f"Every tool tried on {name_of(model)}")
        lines.append(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
        lines += [table.attrs["not reached"]] if "not reached" in table.attrs else []
    show(lines)
    if "wrong" in counts:
        raise typer.Exit(1)
