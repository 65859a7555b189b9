"""The check of every tool on a model: it passes where tools work, and finds those that do something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from support import zoo

from tl_posdisent import bridge_from_hf, check_model, read_model
from tl_posdisent.experiments import model_check

pytestmark = pytest.mark.tl4

_REAL = {name: getattr(model_check, name) for name in dir(model_check)}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
@pytest.mark.usefixtures("unchecked")
def test_tools_work_or_are_refused(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    table = check_model(shared_model(kind, name), lengths=(8, 20), progress=False)
    assert set(table["tool"]) == set(model_check.TOOLS)
    assert not len(table[table["verdict"] == "wrong"])
    works = table[table["verdict"] == "works"]
    assert works["error"].max() < 2e-4
    assert (works["reason"] == "").all()
    refused = table[table["verdict"] == "refused"]
    assert refused["error"].isna().all()
    assert (refused["reason"].str.len() > 30).all()
    rotary = name == "llama-gqa"
    assert (table.loc[table["tool"] == "swap_positions", "verdict"] == ("works" if rotary else "refused")).all()
    texts = table.loc[table["tool"] == "remap_distance", "text"].tolist()
    assert texts == (["8 tokens", "20 tokens", "padded", "KV cache"] if rotary else ["8 tokens"])


@pytest.mark.usefixtures("unchecked")
def test_windows_that_no_text_reaches_are_named(shared_model: Callable[[str, str], Any]) -> None:
    """Of the same model: a text hides keys if and only if it is longer than the window."""
    model = shared_model("bridge", "gemma2")
    (window,) = {spec.window for spec in read_model(model).specs() if spec.window is not None}
    for length, hides in ((window, False), (window + 1, True)):
        table = check_model(model, tools=["additivity"], lengths=(4, length), progress=False)
        keys = [spec.mask(length).sum(1).max() for spec in read_model(model).specs()]
        assert (min(keys) < length) == hides
        assert ("not reached" in table.attrs) == (not hides)
    short = check_model(model, tools=["additivity"], lengths=4, progress=False).attrs["not reached"]
    assert short == (
        f"texts of 4 tokens do not hide what is outside the window of {window} tokens; one of {window + 1} tokens does"
    )


def _unusual(kind: str, **more: Any) -> Any:
    """A tiny model of a class that is not in the zoo."""
    arguments = zoo.ARCHITECTURES["llama-gqa"].arguments | more
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**arguments)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return zoo.as_bridge(model)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "more"), [("Olmo", {"clip_qkv": 0.5}), ("BitNet", {}), ("JetMoe", {"kv_channels": 8})]
)
def test_what_heads_gather_may_be_clipped_or_normalised(kind: str, more: dict[str, Any]) -> None:
    """Neither is an error of the tools; and what has no ``hook_z`` is refused."""
    model = _unusual(kind, **more)
    tools = ["ablate_heads", "head_ablation", "head_patching", "component_patching", "single heads"]
    table = check_model(model, tools=tools, lengths=12, progress=False).set_index("tool")["verdict"]
    assert set(table) == {"refused"} if kind == "JetMoe" else table["head_patching"] == "works"
    assert "wrong" not in set(table)


def _another_head(model: Any, heads: Any, **options: Any) -> Any:
    return _REAL["ablate_heads"](model, [(layer, head + 1) for layer, head in heads], **options)


def _halved(tool: str, column: str) -> Callable[..., pd.DataFrame]:
    def table(*arguments: Any, **options: Any) -> pd.DataFrame:
        real = _REAL[tool](*arguments, **options)
        return real.assign(**{column: real[column] / 2})

    return table


def _nothing(*arguments: Any, **options: Any) -> list[Any]:
    return []


_BROKEN: dict[str, Callable[..., Any]] = {
    "additivity": _halved("additivity", "r2"),
    "controlled_distance": _halved("controlled_distance", "total"),
    **dict.fromkeys(model_check.INTERVENTIONS, _nothing),
    "ablate_heads": _another_head,
    "head_ablation": _halved("head_ablation", "value"),
    "head_patching": _halved("head_patching", "value"),
    "position_patching": _halved("position_patching", "value"),
    "component_patching": _halved("component_patching", "value"),
}


@pytest.mark.parametrize("tool", _BROKEN)
@pytest.mark.usefixtures("unchecked")
def test_a_tool_that_does_something_else_is_found(
    tool: str, shared_model: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model("bridge", "llama-gqa")
    monkeypatch.setattr(model_check, tool, _BROKEN[tool])
    table = check_model(model, tools=[tool], lengths=8, progress=False)
    assert (table["verdict"] == "wrong").any()
    assert (table.loc[table["verdict"] == "wrong", "reason"] != "").all()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma3"))
@pytest.mark.usefixtures("unchecked")
def test_by_default_two_layers_of_each_kind(kind: str, name: str) -> None:
    """With every layer, the verdicts are the same; in between, the model consists of its first blocks."""
    more = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"]}
    depth = {"num_hidden_layers": 5} | (more if name == "gemma3" else {})
    model = (zoo.bridge if kind == "bridge" else zoo.hooked)(name, **depth)
    chosen = [spec.layer for spec in model_check.two_of_each_kind(read_model(model).attention)]
    assert chosen == ([0, 1, 3] if name == "gemma3" else [0, 1])
    ran: list[int] = []
    tools = ["additivity", "swap_positions", "head_ablation"]
    for every_layer in (False, True):
        ran.clear()
        listeners = [(f"blocks.{n}.hook_resid_pre", lambda x, hook, n=n: ran.append(n)) for n in range(5)]
        with model.hooks(fwd_hooks=listeners):
            table = check_model(model, tools=tools, lengths=8, every_layer=every_layer, progress=False)
        assert set(table["verdict"]) == {"works"}
        assert max(ran) == (4 if every_layer else chosen[-1])
    tokens = zoo.random_tokens(8)
    before = model(tokens)
    with model_check.first_blocks(model, 2):
        first = model(tokens)
    assert not torch.equal(first, before)
    assert torch.equal(model(tokens), before)


class EightBits(torch.nn.Linear):
    """A layer with weights in eight bits, whose kernel rounds to bfloat16, as those of quantisation libraries do."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = torch.nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ self.weight.bfloat16().T * self.scale.T.bfloat16()).to(x.dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("quantised", [True, False])
def test_rounding_in_the_kernels_of_quantised_weights_is_no_error(
    quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that of float32, tools would be wrong that are not; also the model's own cached pass would."""
    hf_model = zoo.hf_model("llama-gqa")
    for block in hf_model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in [x for x in part.named_children() if isinstance(x[1], torch.nn.Linear)]:
                setattr(part, name, EightBits(linear))
    model = bridge_from_hf(hf_model)
    tools = ["swap_positions", "dummy_distance", "remap_distance", "position_interpolation"]
    if not quantised:  # the tolerance that the dtype of the other parameters has
        monkeypatch.setattr(model_check, "is_quantised", lambda model: False)
    table = check_model(model, tools=tools, progress=False)
    assert ("wrong" in set(table["verdict"])) != quantised
    assert not quantised or set(table["verdict"]) == {"works"}
    assert table["error"].max() > 2e-4
