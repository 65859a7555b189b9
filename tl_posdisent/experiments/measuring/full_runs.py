"""Runs of the whole model under hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.running.forward_pass import Hook, output_of, running
from tl_posdisent.models.running.texts import Texts


@torch.no_grad()
def run_under(model: Any, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook]) -> Any:
    """Run the model under hooks, and return its output."""
    with running(model), applied(model, hooks):
        return output_of(model, tokens)


def run_texts(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]] | None = None) -> list[Any]:
    """Run the model on each group of texts, under the group's hooks if any, and return the outputs."""
    hooks = [[]] * len(texts.groups) if hooks is None else hooks
    return [run_under(model, group.tokens, group_hooks) for group, group_hooks in zip(texts.groups, hooks, strict=True)]
