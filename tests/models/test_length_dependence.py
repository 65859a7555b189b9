"""Models that rotate or scale long texts in another way than short ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.intervention_cases import close
from torch import Tensor

from tl_posdisent import capture, read_model, remap_distance, swap_positions
from tl_posdisent.hooks import applied
from tl_posdisent.models.running.model_parts import modules
from tl_posdisent.rope import rotate

pytestmark = pytest.mark.tl4

ORIGINAL = 48  # tokens of the training, of a context of 128
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 128 / ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}


def varying(kind: str) -> Any:
    if kind == "longrope":
        return zoo.bridge("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=ORIGINAL)
    return zoo.bridge("llama-gqa", rope_parameters=dict(DYNAMIC), max_position_embeddings=ORIGINAL)


def kept(model: Any) -> dict[str, Any]:
    """Every buffer and number of the model's modules."""
    return {
        f"{i}.{name}": x.clone() if isinstance(x, Tensor) else x
        for i, part in enumerate(modules(model))
        for name, x in {**vars(part), **part._buffers}.items()
        if isinstance(x, (int, float, Tensor, type(None)))
    }


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_reading_knows_up_to_which_length_it_holds(kind: str) -> None:
    assert [spec.holds_to for spec in read_model(varying(kind)).specs()] == [ORIGINAL] * 2


@pytest.mark.parametrize("name", zoo.BRIDGE_NAMES)
def test_others_hold_at_any_length(name: str, shared_model: Any) -> None:
    ends = {16, 3} if name == "llama4" else {None}  # chunks of 16, and a temperature that changes at position 3
    assert {spec.holds_to for spec in read_model(shared_model("bridge", name)).specs()} == ends


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1, 100])
def test_captured_vectors_are_rotated_by_the_tables_of_the_text(kind: str, length: int) -> None:
    model, tokens = varying(kind), zoo.random_tokens(length)
    read = read_model(model).specs()
    with torch.no_grad():
        cache = model.run_with_cache(tokens)[1]
    for layer, spec in zip(capture(model, tokens), read, strict=True):
        assert torch.equal(layer.scores, cache["attn_scores", layer.layer])
        turned = spec.score(*(rotate(x, torch.arange(length), layer.spec.rotary) for x in (layer.q, layer.k)))
        inside = spec.mask(length)
        torch.testing.assert_close(turned[..., inside], layer.scores[..., inside], rtol=0, atol=1e-4)
        same = torch.equal(layer.spec.rotary.frequencies, spec.rotary.frequencies)
        assert same == (length <= ORIGINAL)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("length", [12, 100])
def test_reading_leaves_the_models_tables_as_they_are(kind: str, length: int) -> None:
    """Whatever the last text was: models keep the table of it."""
    model = varying(kind)
    with torch.no_grad():
        model(zoo.random_tokens(length))
    before = kept(model)
    read_model(model)
    after = kept(model)
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x, after[name]) if isinstance(x, Tensor) else x == after[name], name


def test_a_text_beyond_is_refused_where_asked() -> None:
    spec = read_model(varying("longrope")).specs(0)[0]
    spec.check_length(ORIGINAL, "a tool")
    with pytest.raises(ValueError, match=r"tokens must be at most 48 long for a tool, got 49: beyond, layer 0 of Phi3"):
        spec.check_length(49, "a tool")


def scaling() -> Any:
    """Ministral 3, which scales queries by the logarithm of their position."""
    if not hasattr(transformers, "Ministral3Config"):
        pytest.skip("this transformers has no Ministral 3")
    rope = {"rope_type": "default", "rope_theta": 500.0, "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": ORIGINAL}  # fmt: skip
    config = transformers.Ministral3Config(
        vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=128, rope_parameters=rope, sliding_window=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    zoo.randomise(model, 0.2, 0.7)
    return model


def test_scores_scaled_by_position_are_noticed() -> None:
    """A capture of such a text is refused."""
    bridge = zoo.as_bridge(scaling())
    assert {(spec.holds_to, spec.scaled) for spec in read_model(bridge).specs()} == {(ORIGINAL, True)}
    assert not any(spec.scaled for kind in ("longrope", "dynamic") for spec in read_model(varying(kind)).specs())
    assert len(capture(bridge, zoo.random_tokens(ORIGINAL))) == 2
    with pytest.raises(ValueError, match=r"at most 48 long for capture, got 100: .* scales scores by position"):
        capture(bridge, zoo.random_tokens(100))


def test_swapped_positions_are_position_ids_or_refused_where_scores_are_scaled_by_position() -> None:
    reference = scaling()
    bridge = zoo.as_bridge(copy.deepcopy(reference))

    def run(tokens: Tensor, hooks: Any) -> Tensor:
        with torch.no_grad(), applied(bridge, hooks):
            return bridge(tokens)

    for length, first in ((ORIGINAL, 0), (20, 15), (20, 40), (60, 0)):
        tokens, places = zoo.random_tokens(length), first + torch.arange(length).flip(0)
        one, every = swap_positions(bridge, lambda p, at=places: at.double(), heads=[1]), swap_positions(bridge, places)
        if first + length > ORIGINAL:
            for hooks in (one, every):
                with pytest.raises(
                    ValueError, match=r"positions must be from 0 to 47 for swap_pos|at most 48 long"
                ) as caught:
                    run(tokens, hooks)
                if hooks is every:  # its advice is not refused in turn
                    assert ("use remap_distance" in str(caught.value)) == (length <= ORIGINAL)
            if length <= ORIGINAL:
                run(tokens, remap_distance(bridge, lambda distance: 2 * distance))
            continue
        with torch.no_grad():
            ones = torch.ones_like(tokens)
            expected = reference(tokens, position_ids=places[None], attention_mask=ones).logits
        close(run(tokens, every), expected)
        assert not torch.allclose(run(tokens, one), expected, atol=1e-2)
    tokens = zoo.random_tokens(60)
    with torch.no_grad():
        close(run(tokens, swap_positions(bridge, torch.arange(60))), reference(tokens).logits)


@pytest.mark.parametrize("error", [TypeError, IndexError, ValueError])
def test_a_model_that_takes_no_far_positions(error: type[Exception]) -> None:
    """Its rotation holds as far as is known. Any other error is not taken for that."""
    model = zoo.bridge("llama-gqa")
    inner, refused = model.original_model, []
    own = inner.forward

    def forward(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None:
            refused.append(int(position_ids.max()))
            raise error("no position_ids")
        return own(*args, **kwargs)

    vars(inner)["forward"] = forward
    if error is ValueError:
        with pytest.raises(ValueError, match="no position_ids"):
            read_model(model)
    else:
        assert [(spec.holds_to, spec.problem) for spec in read_model(model).specs()] == [(None, None)] * 2
    assert refused
