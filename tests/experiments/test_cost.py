"""Passes are those that tools make, memory is no less than what they hold, and what is refused has a way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support import zoo
from support.live_bytes import LiveBytes

import tl_posdisent as tp
from tl_posdisent.additive.attention import newton, rungs
from tl_posdisent.experiments.cost import Measured
from tl_posdisent.experiments.passes import NOT_ESTIMATED
from tl_posdisent.experiments.passes import TOOLS as TAKES
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading import memory

TOOLS = get_args(Measured)
LAYER_BY_LAYER = (
    *("additivity", "controlled_distance", "subspace_patterns", "fit_attention", "disentanglement"),
    *("positional_symbolic", "trained_vs_random", "dummy_distance_check"),
)
OF_ONE_LAYER = ("positional_subspace", "rope_hadamard")
OF_SEVERAL_TEXTS = ("positional_subspace",)
COPIES = {"head_labels": 2, "trained_vs_random": 4}  # models, each of which makes the same passes


def run_tool(model: Any, tool: str, tokens: torch.Tensor, **options: Any) -> None:
    if tool == "fit_attention":
        kept: list[Captured] = []  # as capture does, in this thread, where it is counted
        for_each_layer(model, tokens, tp.read_model(model).specs()[-1:], kept.append)
        tp.fit_attention(kept.pop().scores)
        return
    length = tokens.shape[1]
    others: dict[str, Any] = {
        "intervention_losses": (tp.dummy_distance(model, 5),),
        "position_effects": (tp.dummy_distance(model, 5),),
        "head_patching": (tokens.flip(1), lambda logits, _: logits[:, -1].mean(-1)),
        "position_patching": (torch.arange(length).flip(0),),
        "length_generalization": ([length // 4, length // 2, length - 1],),
        "output_projection": (tp.dummy_distance(model, 5),),
    }
    options |= {"source": tokens.flip(1)} if tool == "component_patching" else {}
    options |= {"in_range": length // 2} if tool in ("length_generalization", "output_projection") else {}
    if tool in OF_ONE_LAYER:
        layers = options.pop("layers", [len(model.blocks) - 1])
        getattr(tp.experiments, tool)(model, tokens, layers[0], **options)
        return
    options |= {} if tool == "output_projection" else {"progress": False}
    getattr(tp.experiments, tool)(model, tokens, *others.get(tool, ()), **options)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the ladder's fits end early: a step makes no pass, and holds what the first one held and, in the search for
    the query's term, two more vectors, here of 1 kB."""

    def shorten() -> None:
        monkeypatch.setattr(rungs, "_STEPS", 10)
        monkeypatch.setattr(newton, "_MAX_STEPS", 1)
        monkeypatch.setattr(newton, "_MAX_PRODUCTS", 4)
        monkeypatch.setattr(newton, "_DENSE", 0)

    return shorten


@pytest.fixture(scope="module")
def models() -> dict[tuple[int, int], Any]:
    build = zoo.bridge if zoo.BRIDGE_NAMES else zoo.hooked
    shapes = [(3, 8), (4, 4)]
    made = {shape: build("llama-gqa", num_hidden_layers=shape[0], num_attention_heads=shape[1]) for shape in shapes}
    for model in made.values():  # passes of reading are made once, whatever runs afterwards
        tp.read_model(model)
        tp.head_ablation(model, zoo.random_tokens(12, 2), heads=0, progress=False)  # of every layer
    return made


CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "first layer": {"layers": [0]},
    "last layers": {"layers": [1, 2]},
    "one head": {"layers": [1], "heads": [0]},
    "heads": {"heads": ["L0H1", "L2H0", "L2H3"]},
    "positions": {"positions": [1, 5, 7], "layers": [0, 2]},
}


def chosen(tool: str, choice: str) -> bool:
    return set(CHOICES[choice]) <= set(TAKES[tool].takes)


def counted() -> list[tuple[str, str, int, int, int]]:
    """Tools, what they are given, layers, heads and texts: all four combinations where nothing is chosen, else two."""
    sizes = [(3, 8, 1), (4, 4, 2), (3, 8, 2), (4, 4, 1)]
    every = [
        (tool, choice, *size)
        for tool in TOOLS
        for choice in CHOICES
        if chosen(tool, choice) and not (tool in OF_ONE_LAYER and choice == "last layers")
        for size in (sizes if choice == "all" else sizes[:2])
    ]
    return [case for case in every if case[0] not in OF_SEVERAL_TEXTS or case[-1] > 1]


@pytest.mark.parametrize(("tool", "choice", "layers", "heads", "batch"), counted())
@pytest.mark.filterwarnings("ignore:.*converge")
def test_passes_are_counted(
    tool: str, choice: str, layers: int, heads: int, batch: int, models: Any, few_steps: Callable[[], None]
) -> None:
    """In tokens that go through the MLPs, of which shortcuts leave some out."""
    few_steps()
    model, options = models[layers, heads], CHOICES[choice]
    tokens = zoo.random_tokens(24, batch)
    seen: list[int] = []

    def count(module: Any, inputs: Any, x: torch.Tensor) -> None:
        seen.append(x.shape[0] * x.shape[1])
        if x.requires_grad:
            x.register_hook(lambda gradient: seen.append(gradient.shape[0] * gradient.shape[1]))

    handles = [b.mlp.register_forward_hook(count) for b in model.blocks]
    with torch.no_grad():  # random copies take as many as the model, beside what reading them takes
        run_tool(model, tool, tokens, **options, **{"seeds": 1 - ("labels" in tool)} if tool in COPIES else {})
    for handle in handles:
        handle.remove()
    passes = tp.estimate(model, 24, batch=batch, tool=tool, **options).passes
    assert sum(seen) * COPIES.get(tool, 1) / layers / tokens.numel() == pytest.approx(passes, rel=0.1)


@pytest.mark.usefixtures("unchecked")
def test_every_tool_that_runs_a_model_is_estimated_or_left_out_with_a_reason() -> None:
    public = {}
    for module in (tp, tp.experiments, tp.hooks, tp.models, tp.viz):
        public |= {name: getattr(module, name) for name in module.__all__}
    of_models = {name for name, each in public.items() if inspect.isfunction(each) and first_of(each) == "model"}
    assert of_models - {*TOOLS} == {*NOT_ESTIMATED}
    assert {*TOOLS} <= of_models | {"fit_attention"}
    assert {*TOOLS} == {*TAKES}
    for tool, reason in NOT_ESTIMATED.items():
        with pytest.raises(ValueError, match=f"tool must be one whose passes are known, got '{tool}', which {reason}"):
            tp.estimate(tp.load_demo_model(), 100, tool=tool)  # type: ignore[arg-type]


def first_of(function: Any) -> str:
    return next(iter(inspect.signature(function).parameters), "")


def test_a_tool_is_estimated_with_the_arguments_that_it_takes() -> None:
    model = tp.load_demo_model()
    for tool in TOOLS:
        known = inspect.signature(getattr(tp, tool, getattr(tp.experiments, tool, None))).parameters
        known = {*known} | ({"layers"} if "layer" in known else set())
        for name, given in {"layers": [1], "heads": [0], "positions": [3]}.items():
            if name in TAKES[tool].takes:
                assert name in known, tool
                tp.estimate(model, 30, tool=tool, **{name: given})
            else:
                with pytest.raises(ValueError, match=f"{name} must be None for {tool}"):
                    tp.estimate(model, 30, tool=tool, **{name: given})


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), *zoo.cases("neox")[:1]])
@pytest.mark.filterwarnings("ignore:.*converge")
def test_no_tool_holds_more(kind: str, name: str, tool: str, few_steps: Callable[[], None]) -> None:
    """The tensors that are alive at the worst step, at lengths where scores are the smaller and the larger part."""
    # These take layers one by one; the ladder stores of the others what head_ablation stores.
    options: dict[str, Any] = {"layers": [1]} if tool in ("attention_ladder", "preference_flips") else {}
    options |= {"seeds": 1, "fractions": [0, 0.5]} if tool == "perturbation_curve" else {}
    if (kind, name) != zoo.cases("llama-gqa")[0].values or zoo.TL_MAJOR != 3:
        few_steps()  # all of them in one case, where what each adds would be seen
    model = {"bridge": zoo.bridge, "hooked": zoo.hooked}[kind](name, max_position_embeddings=1024)
    batch = 2 if tool in OF_SEVERAL_TEXTS else 1
    for length in (100, 600) if tool in LAYER_BY_LAYER else (64,) if tool == "attention_ladder" else (64, 256):
        with torch.no_grad(), LiveBytes() as live:
            run_tool(model, tool, zoo.random_tokens(length, batch), **options)
        needed = tp.estimate(model, length, batch=batch, tool=tool).needed_bytes
        assert live.most + 2**22 < needed
    if tool in LAYER_BY_LAYER:
        assert needed < 3 * live.most + 2**25


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gemma3"))
def test_kinds_of_layers(kind: str, name: str, shared_model: Any) -> None:
    """Two local layers, then a global one."""
    model = shared_model(kind, name)
    for layers, numbers in (("local", [0, 1]), ("global", [2])):
        found = tp.estimate(model, 24, tool="head_ablation", layers=layers)
        assert found == tp.estimate(model, 24, tool="head_ablation", layers=numbers)


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
