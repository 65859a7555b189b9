"""Patching of padded texts of unequal length: each text alone in the Hugging Face model, whose attention is written out
here, and a dense least-squares fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor
from transformers.models.llama import modeling_llama

from tl_posdisent import component_patching, position_patching

pytestmark = pytest.mark.usefixtures("unchecked")
LENGTHS = [9, 13, 6]
TEXTS = [zoo.random_tokens(n, batch=1, seed=i)[0] for i, n in enumerate(LENGTHS)]
OTHERS = [zoo.random_tokens(n, batch=1, seed=9 + i)[0] for i, n in enumerate(LENGTHS)]
POSITIONS = torch.tensor([5, 0, 3, 3, 30, 11, 24, 2, 7, 20, 1, 8, 6])
HEADS = [2, 5]
Edit = Callable[[int, str, Tensor], Tensor]


def padded(texts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return tuple(pad(x, True, 0, side) for x in (texts, [torch.ones_like(text) for text in texts]))  # type: ignore


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Loss of a text at some positions, under an edit of each layer's ``[head, ...]`` queries, keys and scores."""
    model = zoo.hf_model("llama-gqa")

    @torch.no_grad()
    def run(text: Tensor, positions: Tensor | None, edit: Edit) -> float:
        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
            q, k = edit(module.layer_idx, "q", query[0]), key[0].repeat_interleave(2, 0)
            scores = edit(module.layer_idx, "k", k) @ q.transpose(1, 2) * module.head_dim**-0.5
            scores = edit(module.layer_idx, "scores", scores.transpose(1, 2))
            pattern = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
            return (pattern @ value[0].repeat_interleave(2, 0)).transpose(0, 1)[None], None

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
        ids = torch.arange(len(text)) if positions is None else positions[: len(text)]
        logits = model(text[None], position_ids=ids[None], attention_mask=torch.ones_like(text)[None]).logits[0]
        return float(torch.nn.functional.cross_entropy(logits[:-1].double(), text[1:]))

    return run


def seen(loss: Callable[..., float], text: Tensor, positions: Tensor | None) -> dict[tuple[int, str], Tensor]:
    held: dict[tuple[int, str], Tensor] = {}
    loss(text, positions, lambda layer, name, x: held.setdefault((layer, name), x))
    return held


def mean(losses: list[float]) -> float:
    """Over the predicted tokens of all texts."""
    return sum((n - 1) * loss for n, loss in zip(LENGTHS, losses, strict=True)) / (sum(LENGTHS) - len(LENGTHS))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("keys", ["group", "head"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rotated_vectors(side: str, keys: Any, kind: str, name: str, loss: Any, shared_model: Any) -> None:
    tokens, mask = padded(TEXTS, side)
    options: dict[str, Any] = {"attention_mask": mask, "layers": 1, "heads": HEADS, "progress": False}
    table = position_patching(shared_model(kind, name), tokens, POSITIONS, keys=keys, **options)
    clean = [seen(loss, text, None) for text in TEXTS]
    assert len(table) == len(HEADS)
    for head, value in zip(table["head"], table["value"], strict=True):
        moved = {"q": [head], "k": [head] if keys == "head" else [head // 2 * 2, head // 2 * 2 + 1]}

        def edit(layer: int, what: str, x: Tensor, held: Any, moved: Any = moved) -> Tensor:
            if layer == 1 and what in moved:
                x = x.clone()
                x[moved[what]] = held[layer, what][moved[what]]
            return x

        each = [
            loss(text, POSITIONS, lambda *at, held=held, edit=edit: edit(*at, held))
            for text, held in zip(TEXTS, clean, strict=True)
        ]
        assert value == pytest.approx(mean(each), abs=1e-5)
    plain, lying = (mean([loss(text, at, lambda *x: x[2]) for text in TEXTS]) for at in (None, POSITIONS))
    assert table["clean"][0] == pytest.approx(plain, abs=1e-5)
    assert table["corrupted"][0] == pytest.approx(lying, abs=1e-5)
    assert table["effect"].tolist() == pytest.approx(((table["value"] - lying) / (plain - lying)).tolist(), abs=1e-3)


def distance_part(scores: Tensor) -> Tensor:
    """``[query, key]``, of a fit by ``lstsq``: mean 0 over the cells, with the line that leaves keys without slope."""
    n = len(scores)
    i, j = torch.ones(n, n).tril().nonzero(as_tuple=True)
    design = torch.zeros(len(i), 3 * n, dtype=torch.float64)
    for block, column in enumerate((i - j, i, j)):
        design[torch.arange(len(i)), block * n + column] = 1
    found = torch.linalg.lstsq(design, scores[i, j].double()[:, None], driver="gelsd").solution[:, 0]
    lever = j.double() - j.double().mean()
    slope = (lever * found[2 * n + j]).sum() / (lever * lever).sum()
    part = torch.zeros(n, n, dtype=torch.float64)
    part[i, j] = found[i - j] - slope * (i - j)
    part[i, j] -= part[i, j].mean()
    return part


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_distance_component(side: str, kind: str, name: str, loss: Any, shared_model: Any) -> None:
    (tokens, mask), (source, _) = padded(TEXTS, side), padded(OTHERS, side)
    options: dict[str, Any] = {"attention_mask": mask, "layers": 1, "heads": HEADS, "progress": False}
    table = component_patching(shared_model(kind, name), tokens, "distance", source=source, **options)
    theirs = [seen(loss, text, None)[1, "scores"] for text in OTHERS]
    for head, value in zip(table["head"], table["value"], strict=True):

        def edit(layer: int, what: str, x: Tensor, held: Tensor, head: int = head) -> Tensor:
            if layer == 1 and what == "scores":
                x = x.clone()
                x[head] += (distance_part(held[head]) - distance_part(x[head])).float()
            return x

        each = [
            loss(text, None, lambda *at, held=held, edit=edit: edit(*at, held))
            for text, held in zip(TEXTS, theirs, strict=True)
        ]
        assert value == pytest.approx(mean(each), abs=1e-5)
    assert (table["value"] - table["baseline"]).abs().min() > 1e-4
