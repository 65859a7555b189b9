"""One head at a time restricted to sinks and a window: the numbers of a loop over masked scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.small_models import small_model
from torch import Tensor

from tl_posdisent import head_ablation, lambda_mask
from tl_posdisent.experiments import streaming_ablation

TOKENS = zoo.random_tokens(length=12, batch=3)
pytestmark = pytest.mark.usefixtures("unchecked")


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    log_p = logits[:, :-1].double().log_softmax(-1)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0].mean(-1)


def masked(head: int, sinks: int, window: int) -> Any:
    """A plain hook on the scores."""

    def edit(scores: Tensor, hook: Any) -> Tensor:
        at = torch.arange(scores.shape[-1])
        seen = (at < sinks) | ((at[:, None] - at).abs() < window)
        scores = scores.clone()
        scores[:, head] = scores[:, head].masked_fill(~seen, torch.finfo(scores.dtype).min)
        return scores

    return edit


@pytest.mark.parametrize(
    ("kind", "name"), [*zoo.cases("llama-gqa", "mistral"), ("bridge", "gpt_oss"), ("bridge", "bloom")]
)
@pytest.mark.parametrize(("sinks", "window"), [(2, 3), (0, 4)])
def test_the_numbers_of_the_plain_loop(kind: str, name: str, sinks: int, window: int, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = streaming_ablation(model, TOKENS, sinks=sinks, window=window, progress=False)
    values = []
    for layer, head in zip(table["layer"], table["head"], strict=True):
        edit = (f"blocks.{layer}.attn.hook_attn_scores", masked(head, sinks, window))
        with torch.no_grad(), model.hooks(fwd_hooks=[edit]):
            values.append(float(loss(model(TOKENS), TOKENS).mean()))
    assert table["value"].tolist() == pytest.approx(values, abs=2e-6)
    assert table["effect"].abs().max() > 1e-3
    baseline = head_ablation(model, TOKENS, layers=1, heads=0, progress=False)["baseline"][0]
    assert table["baseline"].tolist() == pytest.approx([baseline] * len(table))


@pytest.mark.parametrize(("sinks", "window"), [(2, 3), (0, 4), (9, 3)])
@pytest.mark.parametrize("encoding", ["rope", "t5"])
def test_both_sides_of_the_query_in_a_model_that_is_not_causal(encoding: str, sinks: int, window: int) -> None:
    """Also where sinks and window together are a whole text: early queries then lose late keys."""
    model, tokens = small_model(encoding=encoding, causal=False), TOKENS % 20

    def size(output: Tensor) -> Tensor:
        return output.double().square().sum(-1)

    table = streaming_ablation(model, tokens, size, sinks=sinks, window=window, progress=False)
    values = []
    for layer, head in zip(table["layer"], table["head"], strict=True):
        edit = (f"blocks.{layer}.attn.hook_attn_scores", masked(head, sinks, window))
        with torch.no_grad(), model.hooks(fwd_hooks=[edit]):
            values.append(float(size(model(tokens)).mean()))
    assert table["value"].tolist() == pytest.approx(values, rel=1e-5)
    assert table["effect"].abs().min() > 1e-3


def test_where_edited_scores_are_discarded(shared_model: Any) -> None:
    """GPT-J's bridge: against the Λ-mask with a ceiling that nothing reaches."""
    model = shared_model("bridge", "gptj")
    table = streaming_ablation(model, TOKENS, sinks=1, window=3, heads=[(0, 2), (1, 7)], progress=False)
    for layer, head, value in zip(table["layer"], table["head"], table["value"], strict=True):
        with torch.no_grad(), model.hooks(fwd_hooks=lambda_mask(model, 1, 3, 100, heads=[(layer, head)])):
            assert value == pytest.approx(float(loss(model(TOKENS), TOKENS).mean()), abs=2e-6)


def test_short_texts_see_no_change(shared_model: Any) -> None:
    """Of a text no longer than sinks and window, and a token longer, beside one of which positions are left out."""
    model, mask = shared_model("bridge", "llama-gqa"), torch.ones_like(TOKENS)
    mask[1, 5:] = mask[2, 6:] = 0
    options: dict[str, Any] = {"sinks": 2, "window": 3, "heads": [(0, 1)], "progress": False}
    table = streaming_ablation(model, TOKENS, attention_mask=mask, **options)
    with torch.no_grad():
        values = [4 * float(loss(model(TOKENS[1:2, :5]), TOKENS[1:2, :5]))]
    for text in (TOKENS[:1], TOKENS[2:, :6]):
        with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", masked(1, 2, 3))]):
            values.append((text.shape[1] - 1) * float(loss(model(text), text)))
    assert table["value"][0] == pytest.approx(sum(values) / (4 + 11 + 5), abs=2e-6)


def test_the_default_window_and_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    options: dict[str, Any] = {"heads": [(1, 2)], "progress": False}
    got = streaming_ablation(model, TOKENS, **options)["value"][0]
    assert got == streaming_ablation(model, TOKENS, sinks=4, window=3, **options)["value"][0]
    with pytest.raises(ValueError, match="window and sinks must hide keys, together less than the 12 tokens"):
        streaming_ablation(model, TOKENS, sinks=9, window=3, **options)
    with pytest.raises(ValueError, match="window and sinks must hide keys, each less than the 12 tokens"):
        streaming_ablation(small_model(causal=False), TOKENS % 20, sinks=12, window=3, progress=False)
