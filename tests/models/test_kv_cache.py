"""Bridges whose attention loses its KV cache: whole texts are right, and a run with a cache is refused.

The fault is imitated whichever versions are installed (``support.cache_faults``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from support import zoo
from support.cache_faults import Fault, lost, renamed
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, L, close
from support.untouched import state_of_model

from tl_posdisent import ablate_heads, check_model, dummy_distance, read_model

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
TEXTS, START = zoo.random_tokens(L), 7
GREEDY = {"do_sample": False, "max_new_tokens": 4}
ARCHITECTURES = [x for x in ("llama-gqa", "gemma2", "gemma3", "neox", "gptj", "gpt_oss") if x in zoo.BRIDGE_NAMES]


def faulty(name: str, fault: Fault, layers: list[int] | None = None) -> Any:
    model = zoo.bridge(name)
    for layer, block in enumerate(model.blocks):
        if layers is None or layer in layers:
            fault(block.attn)
    return model


def by_hand(model: Any, parts: tuple[int, ...] = (START, L)) -> torch.Tensor:
    out, cache = [], {}
    for start, end in zip((0, *parts), parts, strict=False):
        logits, kept = model(TEXTS[:, start:end], return_type="logits_and_cache", use_cache=True, **cache)
        out.append(logits)
        cache = {"past_key_values": kept}
    return torch.cat(out, 1)


def own_generate(model: Any) -> torch.Tensor:
    return model.generate(TEXTS[:1, :START], verbose=False, stop_at_eos=False, **GREEDY)


def generate_of_transformers(model: Any) -> torch.Tensor:
    prompt = TEXTS[:1, :START]
    return model.original_model.generate(
        prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, min_new_tokens=4, **GREEDY
    )


CACHED: dict[str, Callable[[Any], torch.Tensor]] = {
    "by hand": by_hand,
    "by hand, later in parts": lambda model: by_hand(model, (3, 8, L)),
    "generate of the bridge": own_generate,
    "generate of transformers": generate_of_transformers,
}


def refused(run: Callable[[], Any]) -> str:
    with torch.no_grad(), pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        run()
    return str(caught.value)


@pytest.mark.parametrize("fault", [lost, renamed])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_lost_cache_is_refused_and_whole_texts_are_not(name: str, fault: Fault) -> None:
    model, sound = faulty(name, fault), zoo.bridge(name)
    reading, of_sound, before = read_model(model), read_model(sound), state_of_model(model)
    assert all(spec.no_cache is None for spec in of_sound.attention)
    messages = [spec.no_cache or "" for spec in reading.attention]
    for make in TOOLS_FOR_ANY_LENGTH.values():
        hooks = make(reading)
        with torch.no_grad():  # transformers makes a cache for whole texts too, which nobody asked for
            close(model.run_with_hooks(TEXTS, fwd_hooks=hooks), sound.run_with_hooks(TEXTS, fwd_hooks=make(of_sound)))
        for run in CACHED.values():
            with model.hooks(fwd_hooks=hooks):
                messages.append(refused(lambda run=run: run(model)))
    for needed in ("attention of layer 0 does not keep its keys in the KV cache", "use_past_kv_cache=False"):
        assert all(needed in message for message in messages)
    assert all(f"transformers {version('transformers')}" in message for message in messages)
    assert state_of_model(model) == before


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mpt"])
def test_a_cache_is_refused_if_the_model_itself_loses_it(name: str) -> None:
    """As MPT does with TransformerLens 3; nothing is imitated here."""
    model = zoo.bridge(name)
    with torch.no_grad():
        lossy = bool((by_hand(model) - model(TEXTS)).abs().max() > 1e-2)
        with model.hooks(fwd_hooks=ablate_heads(model, [(0, 1)])):
            model(TEXTS)
            if lossy:
                assert "layer 0 does not keep its keys" in refused(lambda: by_hand(model))
            else:
                close(by_hand(model), model(TEXTS), 2e-4)
    assert lossy == (name == "mpt" and zoo.TL_MAJOR == 3)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cache_lost_in_one_layer(layer: int) -> None:
    """Also where the hooks act on another layer."""
    model = faulty("llama-gqa", lost, [layer])
    for edited in [0, 1]:
        hooks = dummy_distance(model, 3, layers=[edited])
        for run in CACHED.values():
            with model.hooks(fwd_hooks=hooks):
                assert f"layer {layer} does not keep its keys" in refused(lambda run=run: run(model))


def test_a_cache_that_was_lost_before_the_hooks() -> None:
    model = faulty("llama-gqa", lost)
    with torch.no_grad():
        _, cache = model(TEXTS[:, :START], return_type="logits_and_cache", use_cache=True)
    hooks = dummy_distance(model, 3)
    with model.hooks(fwd_hooks=hooks):
        assert "does not keep its keys" in refused(lambda: model(TEXTS[:, START:], past_key_values=cache))


class Wrapper(torch.nn.Module):
    """A module of the caller's, with names of its own in ``forward``."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self) -> torch.Tensor:
        kwargs = use_cache = True  # noqa: F841 - names that a pass of transformers has too
        return self.run()


def test_a_pass_within_a_module_of_the_callers() -> None:
    """What its ``forward`` calls its variables does not ask for a cache, and does not hide that the pass does."""
    model = faulty("llama-gqa", lost)
    with torch.no_grad(), model.hooks(fwd_hooks=dummy_distance(model, 3)):
        assert torch.equal(Wrapper(lambda: model(TEXTS))(), model(TEXTS))
        assert "does not keep its keys" in refused(lambda: Wrapper(lambda: by_hand(model))())


def test_check_model_says_once_why_it_refuses() -> None:
    model = faulty("llama-gqa", lost)
    with pytest.warns(UserWarning, match="other logits with a KV cache") as caught:
        table = check_model(model, lengths=12, progress=False)
    cached = table[table["text"] == "KV cache"]
    assert len(cached) == 11
    assert set(cached["verdict"]) == {"refused"}
    assert set(table.loc[table["text"] != "KV cache", "verdict"]) == {"works"}
    (warning,) = [x for x in caught if x.category is UserWarning]
    assert str(warning.message) == table.attrs["KV cache"]
    for needed in ("attention of layer 0", version("transformers"), version("transformer-lens"), "transformers<5.24"):
        assert needed in table.attrs["KV cache"]
