"""Passes are those that tools make, memory is no less than what they hold, and what is refused has a way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support import zoo
from support.live_bytes import LiveBytes

import tl_posdisent as tp
from tl_posdisent.additive.attention import rungs
from tl_posdisent.experiments.cost import Measured
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading import memory

TOOLS = get_args(Measured)
LAYER_BY_LAYER = ("additivity", "controlled_distance", "subspace_patterns", "fit_attention")


def run_tool(model: Any, tool: str, tokens: torch.Tensor, **options: Any) -> None:
    if tool == "fit_attention":
        kept: list[Captured] = []  # as capture does, in this thread, where it is counted
        for_each_layer(model, tokens, tp.read_model(model).specs()[-1:], kept.append)
        tp.fit_attention(kept.pop().scores)
        return
    others = {
        "head_effects": (tp.dummy_distance(model, 5),),
        "head_patching": (tokens.flip(1), lambda logits, _: logits[:, -1].mean(-1)),
        "position_patching": (torch.arange(tokens.shape[1]).flip(0),),
    }
    getattr(tp, tool)(model, tokens, *others.get(tool, ()), progress=False, **options)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the ladder's search end early: each of its hundred steps makes no pass, and holds what the first one held
    and two more vectors, here of 1 kB."""
    return lambda: monkeypatch.setattr(rungs, "_STEPS", 10)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("layers", "heads"), [(3, 8), (4, 4)])
def test_passes_are_counted(tool: str, layers: int, heads: int, few_steps: Callable[[], None]) -> None:
    """In tokens that go through the MLPs, of which shortcuts leave some out."""
    few_steps()
    build = zoo.bridge if zoo.BRIDGE_NAMES else zoo.hooked
    model = build("llama-gqa", num_hidden_layers=layers, num_attention_heads=heads)
    tokens = zoo.random_tokens(24, 1)
    tp.read_model(model)
    seen: list[int] = []

    def count(module: Any, inputs: Any, x: torch.Tensor) -> None:
        seen.append(x.shape[0] * x.shape[1])
        if x.requires_grad:
            x.register_hook(lambda gradient: seen.append(gradient.shape[0] * gradient.shape[1]))

    handles = [b.mlp.register_forward_hook(count) for b in model.blocks]
    of_labels = tool == "head_labels"  # its random copy takes as many as the model, beside what reading it takes
    with torch.no_grad():
        run_tool(model, tool, tokens, **{"seeds": 0} if of_labels else {})
    for handle in handles:
        handle.remove()
    assert sum(seen) * (1 + of_labels) / layers / 24 == pytest.approx(tp.estimate(model, 24, tool=tool).passes, rel=0.1)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), *zoo.cases("neox")[:1]])
def test_no_tool_holds_more(kind: str, name: str, tool: str, few_steps: Callable[[], None]) -> None:
    """The tensors that are alive at the worst step, at lengths where scores are the smaller and the larger part."""
    # The ladder takes layers one by one, and stores of the others what head_ablation stores.
    options: dict[str, Any] = {"layers": [1]} if tool == "attention_ladder" else {}
    if (kind, name) != zoo.cases("llama-gqa")[0].values or zoo.TL_MAJOR != 3:
        few_steps()  # all of them in one case, where what each adds would be seen
    model = {"bridge": zoo.bridge, "hooked": zoo.hooked}[kind](name, max_position_embeddings=1024)
    for length in (100, 600) if tool in LAYER_BY_LAYER else (64,) if tool == "attention_ladder" else (64, 256):
        with torch.no_grad(), LiveBytes() as live:
            run_tool(model, tool, zoo.random_tokens(length, 1), **options)
        needed = tp.estimate(model, length, tool=tool).needed_bytes
        assert live.most + 2**22 < needed
    if tool in LAYER_BY_LAYER:
        assert needed < 3 * live.most + 2**25


@pytest.mark.parametrize("available", [10**9, 3 * 10**7])
def test_what_is_advised_is_accepted(available: int) -> None:
    """Fewer texts, or a shorter one where one does not fit."""
    model = tp.load_demo_model()
    for asked in (
        {"length": 20_000},
        {"length": 20_000, "tool": "fit_attention"},
        {"length": 20_000, "tool": "controlled_distance"},
        {"length": 1500, "batch": 50, "tool": "subspace_patterns"},
        {"length": 1500, "batch": 50},
        {"length": 2_000_000},
    ):
        plan = tp.estimate(model, **asked, available=available)
        assert not plan.fits
        with pytest.raises(MemoryError, match="are available: use ") as refusal:
            plan.check()
        assert plan.advice in str(refusal.value)
        assert "does not fit" in repr(plan)
        changed = dict(re.findall(r"(batch|length)=(\d+)", plan.advice))
        again = tp.estimate(model, **asked | {k: int(v) for k, v in changed.items()}, available=available)
        assert again.check().fits, plan.advice


def test_nothing_fits() -> None:
    with pytest.raises(MemoryError, match="not even two tokens fit"):
        tp.estimate(tp.load_demo_model(), 100, available=0).check()


@pytest.mark.skipif(zoo.TL_MAJOR < 3, reason="needs a bridge")
def test_a_model_without_numbers() -> None:
    """On ``meta`` there are shapes only, and the estimate is the same."""
    real = zoo.bridge("llama-gqa")
    empty = tp.bridge_from_hf(zoo.hf_model("llama-gqa").to("meta"))
    for tool in TOOLS:
        here, there = (tp.estimate(model, 5000, tool=tool, available=10**12) for model in (real, empty))
        assert here == there


def test_additivity_refuses_what_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it runs, and only where one layer's scores alone are more than there is."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=256)
    scores = 8 * 256**2 * 4
    monkeypatch.setattr(memory, "free_memory", lambda devices: scores - 1)
    with pytest.raises(MemoryError, match=r"scores of one layer .* use fewer"):
        tp.additivity(model, tokens, progress=False)
    monkeypatch.setattr(memory, "free_memory", lambda devices: scores)
    assert len(tp.additivity(model, tokens, layers=[0], progress=False)) == 8
    monkeypatch.setattr(memory, "free_memory", lambda devices: None)  # not known: not refused
    assert len(tp.additivity(model, tokens, layers=[1], progress=False)) == 8


def test_free_memory(tmp_path: Any) -> None:
    free = memory.free_memory(["cpu", "mps"])
    assert free is not None
    assert 0 < free < 2**50
    assert memory.free_memory(["mps"]) is None
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._left_by_group(tmp_path) == [350]
    assert [memory.gigabytes(n) for n in (2.5e9, 3e13)] == ["2.5 GB", "30,000 GB"]
