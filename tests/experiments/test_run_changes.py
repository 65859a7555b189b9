"""Every value of a table of changes, heads and texts is that of one text alone under the hooks of one change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.lanes import slow
from torch import Tensor

from tl_posdisent import ablate_heads, dummy_distance, read_model, swap_positions
from tl_posdisent.experiments.measuring import part_runs
from tl_posdisent.experiments.measuring.curvature import curvature
from tl_posdisent.experiments.measuring.run_changes import run_changes
from tl_posdisent.experiments.measuring.token_losses import by_token
from tl_posdisent.hooks import substitute_attention
from tl_posdisent.models.running.texts import Texts, read_texts

LENGTHS = [9, 14, 9, 5, 11]
WIDTH = max(LENGTHS)
ITEMS: list[Any] = [(1, 3), (0, 2), [(0, 1), (0, 0)], [(1, 2), (0, 1)], (1, 0)]  # not sorted, and some together
MODELS = zoo.cases("llama-gqa", "gpt2", "gemma2", "gpt_oss")


def padded_texts(model: Any) -> Texts:
    """Texts of unequal length, padded on the left."""
    mask = torch.stack([torch.arange(WIDTH) >= WIDTH - n for n in LENGTHS])
    return read_texts(model, zoo.random_tokens(WIDTH, batch=len(LENGTHS), seed=3) * mask, mask)


def interventions(reading: Any, texts: Texts) -> dict[str, Any]:
    """Hooks that see each text: a fit of it, and a mean over all."""
    found = {
        "mean": ablate_heads(reading, None, mode="mean", reference=texts),
        "fitted": substitute_attention(reading, "distance"),
    }
    if all(spec.rotary is not None for spec in reading.attention):
        found["distance"] = dummy_distance(reading, 2)
    return found


@torch.no_grad()
def alone(model: Any, text: Tensor, hooks: Any) -> tuple[Tensor, Tensor]:
    """Losses of the next tokens and divergences of a text, by TransformerLens's own runs."""
    clean = model(text[None])[0, :-1].double().log_softmax(-1)
    with model.hooks(fwd_hooks=hooks):
        changed = model(text[None])[0, :-1].double().log_softmax(-1)
    losses = -changed.gather(1, text[1:, None])[:, 0]
    return losses, (clean.exp() * (clean - changed)).sum(-1)


def pairs(item: Any) -> list[tuple[int, int]]:
    return [item] if isinstance(item, tuple) else item


@pytest.mark.parametrize("rows", [4, *slow([1, 32])])
@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.usefixtures("unchecked")
def test_values_are_those_of_each_text_and_change_alone(
    kind: str, name: str, rows: int, shared_reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = shared_reading(kind, name)
    texts = padded_texts(reading.model)
    monkeypatch.setattr(part_runs, "_MAX_ROWS_PER_PASS", rows)
    hooks = interventions(reading, texts)
    found, tokens = (run_changes(reading, texts, hooks, ITEMS, *more) for more in ((), (by_token,)))
    assert found.predictions.tolist() == [n - 1 for n in LENGTHS]
    assert found.values.shape == (len(hooks), len(ITEMS), len(LENGTHS))
    assert found.values.median() > 1e-3
    for change, change_hooks in hooks.items():
        for n, item in enumerate(ITEMS):
            for row, text in enumerate(texts.unpadded()):
                losses, divergences = alone(reading.model, text, change_hooks.of_heads(pairs(item)))
                assert found[change][n, row] == pytest.approx(divergences.mean().item(), rel=1e-4, abs=2e-6)
                own = tokens[change][n, row]
                torch.testing.assert_close(own[: len(losses), 0], losses, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(own[: len(losses), 1], divergences, rtol=1e-3, atol=1e-5)
                assert own[len(losses) :].isnan().all()


def test_hooks_of_each_text_and_of_some_heads(shared_reading: Any) -> None:
    """Functions that make the hooks for some texts of one length; each change has heads of its own."""
    reading = shared_reading("bridge", "llama-gqa")
    texts = padded_texts(reading.model)
    positions = torch.stack([torch.arange(WIDTH) * (1 + row / 3) for row in range(len(LENGTHS))])

    def moved(rows: list[int], heads: Any) -> Any:
        length = LENGTHS[rows[0]]
        return swap_positions(reading, positions[rows, :length], heads=heads)

    def twice(rows: list[int], heads: Any) -> Any:
        def double(z: Tensor, hook: Any) -> Tensor:
            z = z.clone()
            z[:, :, [head for _, head in heads]] *= 2
            return z

        return [("blocks.1.attn.hook_z", double)]

    heads = {"moved": [(0, 4), [(1, 1), (0, 3)]], "twice": [[(1, 5), (1, 2)]]}
    found = run_changes(reading, texts, {"moved": moved, "twice": twice}, heads)
    for change, hooks_of in (("moved", moved), ("twice", twice)):
        assert len(found[change]) == len(heads[change])
        for n, item in enumerate(heads[change]):
            for row, text in enumerate(texts.unpadded()):
                _, divergences = alone(reading.model, text, hooks_of([row], pairs(item)))
                assert found[change][n, row] == pytest.approx(divergences.mean().item(), rel=1e-4, abs=2e-6)


def test_a_run_that_fails_fails_alone(shared_reading: Any) -> None:
    reading = shared_reading("bridge", "llama-gqa")
    texts, zero = padded_texts(reading.model), ablate_heads(reading, None)

    def failing(rows: list[int], heads: Any) -> Any:
        if (1, 3) in heads:
            raise ValueError("no such head")
        return zero.of_heads(heads)

    found = run_changes(reading, texts, {"zero": zero, "failing": failing}, [(0, 1), (1, 3)])
    assert found["failing"][1].isnan().all()
    torch.testing.assert_close(found["failing"][0], found["zero"][0], rtol=1e-4, atol=1e-6)
    assert [(failure.label, str(failure.error)) for failure in found.failures] == [("L1H3", "no such head")]
    with pytest.raises(ValueError, match="no such head"):
        found.checked()


def test_what_is_known_is_not_computed_again() -> None:
    """The blocks before a layer run once, and only its attention under a change; then its heads share a pass."""
    model, rows = zoo.bridge("llama-gqa", num_hidden_layers=4), list[list[int]]()
    texts = read_texts(model, zoo.random_tokens(length=16, batch=2))
    counting = [
        block.mlp.register_forward_hook(lambda part, args, x, n=n: rows[n].append(len(x)) if x.shape[1] == 16 else None)
        for n, block in enumerate(model.blocks)
    ]
    rows += [[] for _ in counting]
    reading = read_model(model)
    run_changes(reading, texts, {"zero": ablate_heads(reading, None)}, [(2, 4), (2, 5), (3, 1)])
    assert rows == [[2], [2], [2, 5], [2, 5, 3]]


@pytest.mark.parametrize("measured", ["runs", "estimates"])
def test_a_bridge_lists_its_hook_points_as_often_for_many_changes_as_for_one(
    measured: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the list anew at each access, which takes as long as the attention of a layer."""
    model, listed = shared_model("bridge", "llama-gqa"), list[int]()
    reading, texts = read_model(model), padded_texts(model)
    changes = {str(n): dummy_distance(reading, n) for n in (1, 2, 3)}
    points = type(model).hook_dict

    def listing(bridge: Any) -> Any:
        listed[-1] += 1
        return points.fget(bridge)

    monkeypatch.setattr(type(model), "hook_dict", property(listing))
    for some in ({"1": changes["1"]}, changes):
        for heads in ([(1, 0)], [(0, 1), (0, 2), (1, 0)]):
            listed.append(0)
            if measured == "runs":
                run_changes(reading, texts, some, heads)
            else:
                curvature(reading, texts, some, dict.fromkeys(some, heads), draws=1)
    assert len(set(listed)) == 1
