"""Commands about models, without a text: ``models`` (names for ``--model``, offline), ``check`` and ``estimate``."""

from __future__ import annotations

from typing import Any

from typer import Option

from tl_posdisent.cli.options import Given, command, name_of, one_of, whole_numbers
from tl_posdisent.cli.output import frame, save
from tl_posdisent.utils.words import plural

_STATUS = {0: "untested", 1: "tested", 2: "skipped", 3: "fails", 4: "in part"}


@command("out")
def models(
    given: Given,
    search: str | None = Option(None, help="Only names and architectures that contain this."),
    untested: bool = Option(False, "--untested", help="Also names that TransformerLens lists but has not tested."),
) -> list[str]:
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
    table = _known_models()
    if not untested:
        table = table[(table["bridge"] == "tested") | (table["hooked"] == "yes")]
    if search is not None:
        table = table[(table["name"] + " " + table["architecture"]).str.contains(search, case=False, regex=False)]
    if not len(table):
        hint = "" if untested else "; more are listed with --untested"
        raise ValueError(f"no model matches{hint}. --model also takes a directory with config.json and safetensors")
    save(table, given.out)
    return [*frame(table, "models"), plural(len(table), "model")]


def _known_models() -> Any:
    """List one row per name, sorted, with the demo model and those of Python packages first."""
    import pandas as pd

    try:
        from transformer_lens.supported_models import OFFICIAL_MODEL_NAMES
        from transformer_lens.tools.model_registry.api import get_supported_models
    except ImportError:  # TransformerLens 2 has no bridge
        from transformer_lens.loading_from_pretrained import OFFICIAL_MODEL_NAMES

        get_supported_models = list

    from tl_posdisent.models.loading.load import has_bridge, has_hooked
    from tl_posdisent.models.loading.packaged import PACKAGED

    hooked = set(OFFICIAL_MODEL_NAMES) if has_hooked() else set()
    bridged = {entry.model_id: entry for entry in get_supported_models()}
    own = {"demo": "LlamaForCausalLM"} | {name: packaged.architecture for name, packaged in PACKAGED.items()}
    both = "yes" if has_hooked() else "–", "tested" if has_bridge() else "–"
    found = [(name, *both, architecture) for name, architecture in own.items()]
    for name in sorted(hooked | bridged.keys(), key=str.lower):
        entry = bridged.get(name)
        architecture = entry.architecture_id if entry else "–"
        status = _STATUS.get(entry.status, "–") if entry else "–"
        found.append((name, "yes" if name in hooked else "–", status, architecture))
    return pd.DataFrame(found, columns=["name", "hooked", "bridge", "architecture"])


@command("model out backend device dtype length seed progress")
def check(
    given: Given,
    every_layer: bool = Option(False, "--every-layer", help="All layers, not only the first two of each kind."),
) -> list[str]:
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
    from tl_posdisent.experiments.model_check import check_model

    model, lengths = given.load(), given.length or 24
    table = check_model(model, every_layer=every_layer, lengths=lengths, seed=given.seed, progress=given.progress)
    title = f"Every tool tried on {name_of(given.model)}"
    save(table, given.out)
    counts = table["verdict"].value_counts()
    given.exit_code = int("wrong" in counts)
    short = table.assign(error=[f"{x:.0e}" for x in table["error"]], reason=table["reason"].str.slice(0, 80))
    counted = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    return [*frame(short, title), counted, *([table.attrs["not reached"]] if "not reached" in table.attrs else [])]


@command("model out backend device dtype length texts layers heads")
def estimate(
    given: Given,
    tool: list[str] | None = Option(
        None, help="Name of a function, such as head_ablation; may be repeated; default all."
    ),
    positions: str | None = Option(None, help="Positions that head_patching patches one by one, such as 0-63."),
    available: float | None = Option(None, min=0, help="Free memory in GB; default that of the device."),
) -> list[str]:
    """Estimate forward passes and memory of measurements, before they run.

    --layers, --heads and --positions count for the tools that take them. Default --length 256.

    Columns:
      tool          the function
      passes        forward passes of all texts through all layers; partial and backward passes count
      needed_GB     upper bound of the memory in addition to the model
      fits          whether that is free
      advice        arguments that would fit, if these do not

    Examples:
      tl-posdisent estimate --model smollm2 --length 512
      tl-posdisent estimate --model smollm2 --tool head_ablation --layers 0-4 --texts 4
    """
    from typing import get_args

    import pandas as pd

    from tl_posdisent.experiments import cost
    from tl_posdisent.experiments.passes import TOOLS

    names: Any = one_of("tool", tool, get_args(cost.Measured))
    chosen = {
        "layers": given.chosen_layers,
        "heads": given.chosen_heads,
        "positions": whole_numbers("positions", positions),
    }
    model, length = given.load(), given.length or 256
    free = None if available is None else int(available * 1e9)
    found = []
    for name in names:
        some: Any = {key: value for key, value in chosen.items() if key in TOOLS[name].takes}
        found.append(cost.estimate(model, length, batch=given.texts, tool=name, available=free, **some).to_frame())
    table = pd.concat(found, ignore_index=True)
    save(table, given.out)
    short = table[["tool", "passes", "fits", "advice"]].replace({"fits": {True: "yes", False: "no"}})
    short.insert(2, "needed_GB", table["needed_bytes"] / 1e9)
    title = f"passes and memory: {name_of(given.model)}, {given.texts} × {length} tokens"
    return [*frame(short, title), f"model: {table['model_bytes'].iloc[0] / 1e9:.2f} GB"]
