"""Tables of positions made longer for a while: the same model with a longer context, and none of it left behind."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import zoo
from support.untouched import state
from torch import Tensor

from tl_posdisent import capture, longer_context, read_model, swap_positions
from tl_posdisent.models.reading import stored_tables

pytestmark = pytest.mark.tl4

LONG = zoo.random_tokens(128)


# The models that look rotations up in a table which ends where their context does.
TABLES = [*zoo.cases("gptj"), *(pytest.param("hooked", x, marks=pytest.mark.slow) for x in ("llama-gqa", "llama-yarn"))]
with_tables = pytest.mark.parametrize(("kind", "name"), TABLES)


def short(kind: str, name: str) -> Any:
    """The model with a context of 64 instead of 128, all else the same."""
    changes: dict[str, Any] = {"n_positions" if name == "gptj" else "max_position_embeddings": 64}
    build = zoo.bridge if kind == "bridge" else zoo.hooked
    return build(name, **changes)


def run(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens)


def buffers(model: Any) -> dict[str, tuple[int, int, bytes]]:
    """Which tensor each buffer is, whether it was written to, and what it holds."""
    whole = [model, *([model.original_model] if hasattr(model, "original_model") else [])]
    named = {f"{n}.{name}": x for n, part in enumerate(whole) for name, x in part.named_buffers()}
    return {name: (id(x), x._version, x.numpy().tobytes()) for name, x in named.items()}


@with_tables
def test_extended_is_built_longer(kind: str, name: str) -> None:
    model, built = short(kind, name), zoo.load(kind, name)
    with pytest.raises((RuntimeError, IndexError)):
        run(model, LONG)
    with longer_context(model, 128) as same:
        assert same is model
        got = run(model, LONG)
        captured = [x.scores for x in capture(model, LONG)]
    torch.testing.assert_close(got, run(built, LONG), rtol=0, atol=1e-5)
    for ours, theirs in zip(captured, capture(built, LONG), strict=True):
        torch.testing.assert_close(ours, theirs.scores, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("unchecked")
@with_tables
def test_everything_is_restored(kind: str, name: str) -> None:
    model = short(kind, name)
    plain, before, untouched = run(model, LONG[:, :64]), buffers(model), state(model)
    with longer_context(model, 100):
        run(model, LONG[:, :100])
        assert torch.equal(run(model, LONG[:, :64]), plain)  # rows within the context are the same ones
    assert buffers(model) == before
    with longer_context(model, 100), longer_context(model, 128):
        run(model, LONG)
    with pytest.raises(ValueError, match="stop"), longer_context(model, 128):
        raise ValueError("stop")
    assert buffers(model) == before
    assert state(model) == untouched
    assert torch.equal(run(model, LONG[:, :64]), plain)
    with pytest.raises((RuntimeError, IndexError)):
        run(model, LONG)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_it_reads_what_no_table_is_needed_for(kind: str, name: str, shared_model: Any) -> None:
    """The two classes agree beyond the context; positions moved by a constant still change nothing there."""
    model, tokens = shared_model(kind, name), zoo.random_tokens(160)
    with torch.no_grad():
        expected = zoo.hf_model("llama-gqa")(tokens, use_cache=False).logits
    with longer_context(model, 160):
        torch.testing.assert_close(run(model, tokens), expected, rtol=0, atol=1e-3)
        with model.hooks(fwd_hooks=swap_positions(model, torch.arange(160) + 3)):
            torch.testing.assert_close(run(model, tokens), expected, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
def test_learned_positions_end(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = state(model)
    message = (
        r"length must be at most 128 for this model, got 200: .*learned \(absolute\) positions cannot be continued"
    )
    with pytest.raises(ValueError, match=message), longer_context(model, 200):
        pass
    with longer_context(model, 128):
        run(model, LONG)
    assert state(model) == before


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("gptj"))
def test_a_table_that_follows_no_formula_is_refused(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that differs at the end of the table only, as a rescaled one might."""
    model, real = short(kind, name), stored_tables.longer_tables
    before = buffers(model)

    def other(*arguments: Any) -> Any:
        for table in real(*arguments):
            changed = table.clone()
            changed[60:] = table[61 : len(table) + 1].mean(0)
            yield changed

    monkeypatch.setattr(stored_tables, "longer_tables", other)
    message = r"length must be at most 64 for layer 0 of \w+: its table of rotations \(\w+\) follows no formula"
    with pytest.raises(ValueError, match=message), longer_context(model, 128):
        pass
    assert buffers(model) == before


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
def test_learned_positions_end_in_a_long_context(
    kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose scores are too many to run a text of that length."""
    model = shared_model(kind, name)
    monkeypatch.setitem(inspect.unwrap(longer_context).__globals__, "_MOST_BYTES", 0)
    with pytest.raises(ValueError, match=r"length must be at most 128 for this model, got 200: .*learned \(absolute\)"):
        longer_context(model, 200).__enter__()
    with longer_context(model, 128):
        assert run(model, LONG).isfinite().all()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "bloom"))
def test_a_long_context_runs_few_tokens(
    kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary models and ALiBi go on, at the cost of no text of that length."""
    model, longest = shared_model(kind, name), []
    monkeypatch.setitem(inspect.unwrap(longer_context).__globals__, "_MOST_BYTES", 0)
    n = model.cfg.n_ctx
    read_model(model)
    handle = model.register_forward_pre_hook(lambda module, inputs: longest.append(inputs[0].shape[1]))
    with longer_context(model, n + 1):
        handle.remove()
        assert max(longest, default=0) <= 8
        with torch.no_grad():
            assert model(zoo.random_tokens(n + 1, 1)).isfinite().all()


@pytest.mark.parametrize("kind", ["rotary", "standard"])
def test_native_models_end_with_their_context_for_the_reason_that_is_given(kind: str) -> None:
    """TransformerLens's own models refuse longer texts by themselves, also those without learned positions."""
    from transformer_lens.model_bridge import TransformerBridge

    config = {
        **{"n_layers": 1, "d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 64, "d_vocab": zoo.VOCAB, "n_ctx": 64},
        **{"act_fn": "gelu", "normalization_type": "LN", "positional_embedding_type": kind, "rotary_dim": 8, "seed": 0},
    }
    model = TransformerBridge.boot_native(config)
    with (
        pytest.raises(ValueError, match=r"length must be at most 64 .*exceeds n_ctx=64") as caught,
        longer_context(model, 65),
    ):
        pass
    assert ("learned (absolute) positions" in str(caught.value)) == (kind == "standard")
