"""``tl-posdisent models``: what ``--model`` can be, by TransformerLens's own lists; no network is asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import line, rows

_STATUS = {0: "untested", 1: "tested", 2: "skipped", 3: "fails", 4: "in part"}

# For the eye alone: whatever is computed is read from the running model. Each was tried on a small model of its kind.
_POSITIONS = {
    "rotary": """CodeGenForCausalLM CohereForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GlmForCausalLM
        GPTJForCausalLM GPTNeoXForCausalLM GptOssForCausalLM LlamaForCausalLM MistralForCausalLM Olmo2ForCausalLM
        Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM SmolLM3ForCausalLM StableLmForCausalLM""",
    "rotary (MLA)": "DeepseekV3ForCausalLM",
    "learned": "GPT2LMHeadModel GPTNeoForCausalLM OPTForCausalLM",
    "ALiBi": "BloomForCausalLM MptForCausalLM",
}
_ENCODING = {architecture: name for name, group in _POSITIONS.items() for architecture in group.split()}


def models(
    search: Annotated[str | None, typer.Option(help="Only names and architectures that contain this.")] = None,
    backend: Annotated[Literal["any", "hooked", "bridge"], typer.Option(help="Only models of this class.")] = "any",
    untested: Annotated[
        bool, typer.Option("--untested", help="Also names that TransformerLens lists for its bridge without a test.")
    ] = False,
    out: o.Out = None,
) -> None:
    """List the names for --model: the demo model, and the models of the installed TransformerLens.

    Columns:
      name           for --model
      hooked         yes, if HookedTransformer supports it
      bridge         as TransformerLens says: tested, untested, fails …
      architecture   the class in transformers, if TransformerLens lists it
      positions      position encoding, where this package was tested

    Examples:
      tl-posdisent models --search pythia
      tl-posdisent models --search llama --backend hooked
      tl-posdisent models --untested --out models.csv
    """
    with answering():
        check_out(out)
        table = known_models()
        if not untested:
            table = table[(table["bridge"] == "tested") | (table["hooked"] == "yes")]
        if backend != "any":
            table = table[table[backend] != "–"]
        if search is not None:
            found = [table[name].str.contains(search, case=False, regex=False) for name in ("name", "architecture")]
            table = table[found[0] | found[1]]
        if not len(table):
            hint = "" if untested else "; more are listed with --untested"
            raise ValueError(f"no model is like that{hint}. A directory with config.json and safetensors works too")
        save(table, out, "Models that --model can name")
    rows(table, "models")
    line(f"{len(table)} model{'s' if len(table) > 1 else ''}")


def known_models() -> Any:
    """One row per name, sorted, the demo model first: ``name``, ``hooked``, ``bridge``, ``architecture``,
    ``positions``."""
    import pandas as pd

    try:
        from transformer_lens.supported_models import OFFICIAL_MODEL_NAMES
        from transformer_lens.tools.model_registry.api import get_supported_models
    except ImportError:  # TransformerLens 2 has no bridge
        from transformer_lens.loading_from_pretrained import OFFICIAL_MODEL_NAMES

        get_supported_models = list

    from tl_posdisent.models.loading.load import has_bridge, has_hooked

    hooked = set(OFFICIAL_MODEL_NAMES) if has_hooked() else set()
    bridged = {entry.model_id: entry for entry in get_supported_models()}
    demo = ("demo", "yes" if has_hooked() else "–", "tested" if has_bridge() else "–", "LlamaForCausalLM", "rotary")
    found = [demo]
    for name in sorted(hooked | bridged.keys(), key=str.lower):
        entry = bridged.get(name)
        architecture = entry.architecture_id if entry else "–"
        status = _STATUS.get(entry.status, "–") if entry else "–"
        found.append((name, "yes" if name in hooked else "–", status, architecture, _ENCODING.get(architecture, "–")))
    return pd.DataFrame(found, columns=["name", "hooked", "bridge", "architecture", "positions"])
