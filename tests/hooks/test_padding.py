"""Interventions on padded batches: each text is as it is alone, on either side, in both classes, in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, WAYS, L, close
from support.lanes import slow
from torch import Tensor

from tl_posdisent import ablate_heads, dummy_distance, position_interpolation, remap_distance, swap_positions
from tl_posdisent.hooks import applied, drop_component, phase_noise, substitute_additive, substitute_attention
from tl_posdisent.models.reading.model_reading import model_of
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
PAD = 4
TEXTS = zoo.random_tokens(L)
TOOLS: dict[str, Callable[..., list[Hook]]] = {
    **TOOLS_FOR_ANY_LENGTH,
    "three axes": lambda m, **w: substitute_additive(m, **w),
    "two axes": lambda m, **w: substitute_additive(m, axes="two", **w),
    "distance": lambda m, **w: substitute_attention(m, "distance+sink", **w),
    "additive": lambda m, **w: substitute_attention(m, "additive", **w),
    "component": lambda m, **w: drop_component(m, "key", **w),
}


WITHOUT_MASK = ["ablation"]
"""Tools that need not know where the padding is: of a model that shows no mask these are right, and others refuse."""


def padded(side: str) -> tuple[Tensor, Tensor, slice]:
    """A short text beside a long one, its mask, and where its tokens are."""
    tokens, mask = TEXTS.clone(), torch.ones(2, L, dtype=torch.int64)
    short = TEXTS[0, : L - PAD]
    where = slice(PAD, L) if side == "left" else slice(0, L - PAD)
    tokens[0], mask[0] = 0, 0
    tokens[0, where], mask[0, where] = short, 1
    return tokens, mask, where


def check(
    model: Any,
    make: Callable[..., list[Hook]],
    side: str,
    atol: float,
    *,
    positions: bool = False,
    **where: Any,
) -> None:
    """Compare a padded batch with its texts alone; with ``positions`` they are given to the model, too."""
    tokens, mask, at = padded(side)
    hooks = make(model, **where)
    model = model_of(model)
    options = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if positions else {}
    with torch.no_grad(), applied(model, hooks):
        together = model(tokens, attention_mask=mask, **options)
        short, long = model(TEXTS[:1, : L - PAD]), model(TEXTS[1:])
    close(together[0, at].float(), short[0].float(), atol)
    close(together[1].float(), long[0].float(), atol)


@pytest.mark.parametrize("side", ["left", *slow(["right"])])
@pytest.mark.parametrize(("kind", "name"), WAYS)
def test_each_text_is_as_it_is_alone(kind: str, name: str, side: str, shared_reading: Any) -> None:
    model, every = shared_reading(kind, name), [{}, {"heads": [1, 6]}]
    cases = [(tool, where) for tool in TOOLS for where in (every if name == "llama-gqa" else [every[side == "left"]])]
    right = []
    for tool, where in cases:
        try:
            check(model, TOOLS[tool], side, 2e-4, **where)
            right.append(tool)
        except ValueError as error:
            unclear = name == "codegen" and tool in BY_POSITION  # whose positions no hook shows
            assert ("hides the first" if unclear else "unpadded") in str(error), (tool, where)  # noqa: PT017
        except AssertionError as error:
            raise AssertionError(f"{tool} {where} {side}: {error}") from error
    shows_no_mask = (kind, name) == ("bridge", "gptj")
    shows_no_positions = (kind, name, side) == ("bridge", "codegen", "left")
    refused = [x for x in TOOLS if x not in WITHOUT_MASK] if shows_no_mask else BY_POSITION * shows_no_positions
    assert right == [tool for tool, _ in cases if tool not in refused]


ABSOLUTE: dict[str, Callable[..., list[Hook]]] = {
    "swap": lambda m, **w: swap_positions(m, lambda p: p**2, **w),
    "noise": lambda m, **w: phase_noise(m, 0.7, **w),
    "both": lambda m, **w: swap_positions(m, lambda p: p**2, **w) + phase_noise(m, 0.7) + position_interpolation(m, 2),
    "beside others": lambda m, **w: remap_distance(m, lambda d: d / 2, heads=[0, 2]) + phase_noise(m, 0.7, heads=[1]),
}
"""Interventions by position: of a text whose first token has another position than 0 they are other ones."""
BY_POSITION = ["swap", "noise", "lambda"]
"""Those among the tools; the Λ-mask keeps a text's first keys."""


@pytest.mark.parametrize("side", ["left", *slow(["right"])])
def test_a_model_that_counts_padding_as_positions(side: str, shared_reading: Any) -> None:
    """Qwen3.5 as released: TransformerLens does not give it the positions of the tokens of padded texts."""
    reading = shared_reading("bridge", "qwen3.5")
    tokens, mask, _ = padded(side)
    seen: list[Tensor] = []
    with torch.no_grad():
        watch = [("blocks.1.attn.hook_cos", lambda x, hook: seen.append(x))]
        reading.model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=watch)
        if zoo.TL_MAJOR == 3:
            assert torch.equal(*seen[0].expand(2, -1, -1))  # both texts have the same positions
        for tool, make in (ABSOLUTE | TOOLS).items():
            hooks = make(reading, layers=[1])
            if tool in ABSOLUTE:
                shifted = reading.model.run_with_hooks(TEXTS, fwd_hooks=hooks, position_ids=torch.arange(L)[None] + PAD)
                assert (shifted - reading.model.run_with_hooks(TEXTS, fwd_hooks=hooks)).abs().max() > 0.1, tool
    for tool, make in (ABSOLUTE | TOOLS).items():
        for where in ({}, {"heads": [1, 6]}) if tool != "beside others" else ({},):
            unclear = side == "left" and (tool in ABSOLUTE or tool in BY_POSITION)
            if unclear:
                with pytest.raises(ValueError, match=f"hides the first {PAD} keys of row 0 from all later tokens"):
                    check(reading, make, side, 2e-4, **where)
            try:
                check(reading, make, side, 2e-4, positions=unclear, **where)
            except AssertionError as error:
                raise AssertionError(f"{tool} {where}: {error}") from error


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "codegen"))
@pytest.mark.parametrize("tool", ABSOLUTE)
def test_a_mask_of_pairs_of_tokens(name: str, tool: str, shared_reading: Any) -> None:
    """With such a mask TransformerLens leaves positions to the model, which counts padding, and packed texts on.

    Hooks do not choose a meaning of the first keys, which are hidden from all later tokens: position IDs do.
    """
    reading = shared_reading("bridge", name)
    tokens, mask, at = padded("left")
    hooks = ABSOLUTE[tool](reading)
    text, half = torch.arange(L) // (L // 2), torch.arange(L) % (L // 2)
    padding = {"attention_mask": of_pairs(mask[:, None, :].bool() | torch.eye(L).bool())}
    packing = {"attention_mask": of_pairs((text[:, None] == text).expand(2, -1, -1))}
    for options in (padding, packing):
        with pytest.raises(ValueError, match=r"hides the first \d keys of row 0 from all later tokens"):
            reading.model.run_with_hooks(tokens, fwd_hooks=hooks, **options)
    if name == "codegen":  # whose positions no hook shows
        return
    with torch.no_grad(), applied(reading.model, hooks):
        expected = reading.model(TEXTS[:1, : L - PAD]), reading.model(TEXTS[1:])
        left = reading.model(tokens, **padding, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
        halves = [reading.model(part) for part in TEXTS.split(L // 2, 1)]
        packed = reading.model(TEXTS, **packing, position_ids=half.expand(2, -1))
    close(left[:1, at], expected[0], 2e-4)
    close(left[1:], expected[1], 2e-4)
    close(packed, torch.cat(halves, 1), 2e-4)


def of_pairs(seen: Tensor) -> Tensor:
    """The causal mask ``[batch, 1, query, key]`` of transformers, in which tokens also see nothing but these keys."""
    return torch.zeros(len(seen), 1, L, L).masked_fill(~seen.tril()[:, None], torch.finfo(torch.float32).min)


PACKED = {"position_ids": (torch.arange(L) % (L // 2)).expand(2, -1)}


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "codegen"))
def test_texts_packed_by_their_positions_alone(name: str, shared_reading: Any) -> None:
    """transformers hides them from each other in a pass without a mask and a cache; in others the hooks say so."""
    reading = shared_reading("bridge", name)
    model, message = reading.model, r"position_ids must not begin again at 0|are not what its queries, keys"
    with torch.no_grad():
        plain = torch.cat([model(half) for half in TEXTS.split(L // 2, 1)], 1)
        for tool, make in (ABSOLUTE | TOOLS_FOR_ANY_LENGTH).items():
            hooks = make(reading)
            with applied(model, hooks):
                halves = torch.cat([model(half) for half in TEXTS.split(L // 2, 1)], 1)
                if tool == "ablation":  # what the model makes of such a row is its own
                    assert (model(TEXTS, **PACKED) - halves).abs().max() > 0.1
                    continue
                for more in ({}, {"use_cache": True}, {"attention_mask": torch.ones_like(TEXTS)}):
                    with pytest.raises(ValueError, match=message):
                        model(TEXTS, **PACKED, **more)
                if name == "codegen" and tool in (*ABSOLUTE, *BY_POSITION):  # whose positions no hook shows
                    with pytest.raises(ValueError, match="hides the first 6 keys of row 0 from all later tokens"):
                        model(TEXTS, **PACKED, use_cache=False)
                    continue
                close(model(TEXTS, **PACKED, use_cache=False), halves, 2e-4)
                assert (halves - plain).abs().max() > 0.01


def test_other_positions_that_repeat_are_not_packed_texts(shared_reading: Any) -> None:
    """Those of padding, those of a text read backwards, and one position for all."""
    reading = shared_reading("bridge", "llama-gqa")
    tokens, mask, _ = padded("left")
    derived = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), applied(reading.model, dummy_distance(reading, 3)):
        expected = reading.model(TEXTS)
        for positions in (torch.arange(L).flip(0), torch.zeros(L, dtype=torch.int64), torch.arange(L) // 2):
            given = {"position_ids": positions[None], "attention_mask": torch.ones_like(TEXTS)}
            close(reading.model(TEXTS, **given), expected, 1e-4)
        close(reading.model(tokens, attention_mask=mask, position_ids=derived)[1], expected[1], 1e-4)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gptj"))
def test_no_text_gets_what_another_has_at_its_padding(name: str, shared_model: Any) -> None:
    """``"resample"`` runs on texts of equal length alone."""
    model = shared_model("bridge", name)
    hooks = ablate_heads(model, [(0, 1), (1, 2)], mode="resample")
    with torch.no_grad(), applied(model, hooks):
        model(TEXTS, attention_mask=torch.ones_like(TEXTS))
        for side in ("left", "right"):
            tokens, mask, _ = padded(side)
            with pytest.raises(
                ValueError, match=r"texts must have equal length and no padding, got padding at blocks\.0"
            ):
                model(tokens, attention_mask=mask)


@pytest.mark.parametrize("tool", ["three axes", "two axes", "component"])
def test_packed_texts_are_not_fitted_as_one(tool: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    text = torch.arange(L) // (L // 2)
    packed = (text[:, None] == text).tril()[None, None].expand(len(TEXTS), -1, -1, -1)
    mask = torch.zeros(packed.shape).masked_fill(~packed, torch.finfo(torch.float32).min)
    with torch.no_grad(), applied(model, TOOLS[tool](model)):
        with pytest.raises(ValueError, match=r"attention_mask must leave one text in each row for .* packed texts"):
            model(TEXTS, attention_mask=mask)
        whole = torch.zeros(packed.shape).masked_fill(torch.ones(L, L).triu(1).bool(), torch.finfo(torch.float32).min)
        torch.testing.assert_close(model(TEXTS, attention_mask=whole), model(TEXTS))
