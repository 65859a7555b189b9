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

from tl_posdisent.hooks import applied, drop_component, substitute_additive, substitute_attention
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


BY_POSITION = ["swap", "noise", "lambda"]
"""Functions of positions, which in a row that is padded on the left are ambiguous."""


def check(model: Any, make: Callable[..., list[Hook]], side: str, atol: float, **where: Any) -> None:
    """Compare a padded batch with its texts alone."""
    tokens, mask, at = padded(side)
    hooks = make(model, **where)
    model = model_of(model)
    with torch.no_grad(), applied(model, hooks):
        together = model(tokens, attention_mask=mask)
        short, long = model(TEXTS[:1, : L - PAD]), model(TEXTS[1:])
    close(together[0, at].float(), short[0].float(), atol)
    close(together[1].float(), long[0].float(), atol)


@pytest.mark.parametrize("side", ["left", *slow(["right"])])
@pytest.mark.parametrize(("kind", "name"), [*WAYS, *slow([("bridge", "qwen3.5"), ("bridge", "codegen")])])
def test_each_text_is_as_it_is_alone(kind: str, name: str, side: str, shared_reading: Any) -> None:
    """Also in Qwen3.5 as released, to which TransformerLens does not give the positions of padded texts."""
    model, every = shared_reading(kind, name), [{}, {"heads": [1, 6]}]
    cases = [(tool, where) for tool in TOOLS for where in (every if name == "llama-gqa" else [every[side == "left"]])]
    shows_no_mask = (kind, name) == ("bridge", "gptj")
    right = []
    for tool, where in cases:
        try:
            check(model, TOOLS[tool], side, 2e-4, **where)
            right.append(tool)
        except ValueError as error:
            words = "unpadded" if shows_no_mask else "must not hide the first keys of a row"
            assert words in str(error), (tool, where)  # noqa: PT017
        except AssertionError as error:
            raise AssertionError(f"{tool} {where} {side}: {error}") from error
    refused = [x for x in TOOLS if x not in WITHOUT_MASK] if shows_no_mask else BY_POSITION * (side == "left")
    assert right == [tool for tool, _ in cases if tool not in refused]


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
