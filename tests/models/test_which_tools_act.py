"""What the table of a reading says of tools is what they do: layer by layer, their laws hold or they refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.support_laws import ACTS, TOOLS, one_layer, try_laws

from tl_posdisent import ablate_heads, read_model

pytestmark = [pytest.mark.tl4, pytest.mark.usefixtures("unchecked")]


def assert_the_table_is_right(model: Any) -> None:
    """Try every tool on each layer alone; it refuses for the table's reason (of results, in its own words)."""
    reading = read_model(model)
    for _, row in reading.to_frame().iterrows():
        tried = try_laws(one_layer(reading, row["layer"]))
        whole = tried[tried["text"] == "whole"].set_index("tool")
        expected = {tool: "works" if row[group] else "refused" for group in ACTS for tool in ACTS[group]}
        assert whole["verdict"].to_dict() == {tool: expected[tool] for tool in TOOLS}, tried.to_string()
        reasons = [part.partition(": ")[2].removeprefix("it ") for part in row["why_not"].split("; ") if part]
        others = whole.drop(index=list(ACTS["result_edits"]))
        for message in others.loc[others["verdict"] == "refused", "reason"]:
            assert any(reason in message for reason in reasons), (message, reasons)
        named = [name for part in row["why_not"].split("; ") for name in part.partition(": ")[0].split(", ") if name]
        assert sorted(named) == sorted(group for group in ACTS if not row[group])


def test_every_tool_is_in_one_group() -> None:
    assert sorted(tool for tools in ACTS.values() for tool in tools) == sorted(TOOLS)


@pytest.mark.parametrize(
    ("kind", "name"), zoo.cases("llama-gqa", "gptj", "deepseek_v3", "gpt2", "bloom", "lfm2", "gemma4")
)
def test_which_tools_act(kind: str, name: str, shared_model: Any) -> None:
    assert_the_table_is_right(shared_model(kind, name))


UNUSUAL = [("Olmo", {"clip_qkv": 0.5}), ("BitNet", {}), ("JetMoe", {"kv_channels": 8})]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), UNUSUAL, ids=[family for family, _ in UNUSUAL])
def test_which_tools_act_on_unusual_attention(family: str, more: dict[str, Any]) -> None:
    """What heads gather may be clipped or normalised; and without any hook of attention nothing acts."""
    arguments = zoo.ARCHITECTURES["llama-gqa"].arguments | more
    config = getattr(transformers, f"{family}Config")(**arguments)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    bridge = zoo.as_bridge(model)
    assert_the_table_is_right(bridge)
    assert read_model(bridge).to_frame()[list(ACTS)].to_numpy().any() == (family != "JetMoe")


def test_results_without_effect_are_named() -> None:
    hf = zoo.hf_model("llama-gqa")
    with torch.no_grad():
        hf.model.layers[1].self_attn.o_proj.weight.zero_()
    model = zoo.as_bridge(hf)
    table = read_model(model).to_frame()
    assert table["result_edits"].tolist() == [True, False]
    why = "result_edits: another z at hook_z does not change the output, so no head can be ablated"
    assert table["why_not"].tolist() == ["", why]
    with pytest.raises(ValueError, match="another z at hook_z does not change the output"):
        ablate_heads(model, [(1, 3)])
