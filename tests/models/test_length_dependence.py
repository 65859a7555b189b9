"""Models that rotate, scale or mask long texts in another way than short ones: right up to a length, refused beyond."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.intervention_cases import close
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import capture, read_model, remap_distance, swap_positions
from tl_posdisent import experiments as ex
from tl_posdisent.hooks import applied
from tl_posdisent.models.capture import listen_vectors
from tl_posdisent.models.reading.length_limits import length_limit
from tl_posdisent.models.running.model_parts import modules

pytestmark = pytest.mark.usefixtures("unchecked")

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
FIXED = {"rope_type": "default", "rope_theta": 500.0}
SCALING = FIXED | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": ORIGINAL}

KINDS = {  # the limit, and the layer whose it is
    "longrope": (ORIGINAL, 0),
    "dynamic": (ORIGINAL, 0),
    "chunked": (16, 0),
    "temperature": (15, 3),
    "temperature of rotated": (ORIGINAL, 0),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def varying(kind: str, *, fixed: bool = False) -> transformers.PreTrainedModel:
    """A model of this kind, or one with the same weights that treats texts of all lengths as this one short texts."""
    if kind == "longrope":
        rope = LONGROPE | {"long_factor": LONGROPE["short_factor"]} if fixed else dict(LONGROPE)
        return zoo.hf_model("phi3", rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    if kind == "dynamic":
        return zoo.hf_model("llama-gqa", rope_parameters=FIXED if fixed else DYNAMIC, max_position_embeddings=ORIGINAL)
    if kind == "temperature of rotated":
        return _ministral_3(SCALING | {"llama_4_scaling_beta": 0.0} if fixed else SCALING)
    chunk, floor = 16 if kind == "chunked" and not fixed else 1000, 16 if kind == "temperature" and not fixed else 1000
    return zoo.hf_model("llama4", attention_chunk_size=chunk, floor_scale=floor)


def _ministral_3(rope: dict[str, Any]) -> transformers.PreTrainedModel:
    """Ministral 3, which scales queries by the logarithm of their position."""
    config = transformers.Ministral3Config(
        vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=128, rope_parameters=dict(rope), sliding_window=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    zoo.randomise(model, 0.2, 0.7)
    return model


# --- the limit is read from the configuration -----------------------------------------------------------------


@every_kind
def test_the_reading_knows_up_to_which_length_it_holds(kind: str) -> None:
    limit, layer = KINDS[kind]
    specs = read_model(zoo.as_bridge(varying(kind))).specs()
    assert min(spec.limits.holds_to for spec in specs if spec.limits.holds_to is not None) == limit
    assert specs[layer].limits.holds_to == limit


def test_limits_of_configurations() -> None:
    def limit(layer: int = 0, **config: Any) -> int | None:
        return length_limit(SimpleNamespace(original_model=SimpleNamespace(config=SimpleNamespace(**config))), layer)

    by_kind = {"rope_parameters": {"sliding_attention": FIXED, "full_attention": LONGROPE}}
    by_kind |= {"layer_types": ["sliding_attention", "full_attention"]}
    assert [limit(layer, **by_kind) for layer in (0, 1)] == [None, ORIGINAL]
    assert limit(rope_parameters=DYNAMIC, max_position_embeddings=64) == 64
    assert limit(rope_parameters=DYNAMIC | {"alpha": 1000.0}, max_position_embeddings=64) is None
    assert limit(rope_parameters=LONGROPE, index_topk=20) == 20  # the nearer
    for static in ("linear", "llama3", "yarn", "proportional", "unknown"):
        rope = {"rope_type": static, "factor": 2.0, "original_max_position_embeddings": 8}
        assert limit(rope_parameters=rope, max_position_embeddings=64) is None
    assert length_limit(SimpleNamespace(), 0) is None  # no Hugging Face model


# --- up to that length, everything is right -------------------------------------------------------------------


@every_kind
def test_captured_vectors_give_the_pattern(kind: str) -> None:
    model, tokens = zoo.as_bridge(varying(kind)), zoo.random_tokens(KINDS[kind][0])
    with torch.no_grad():
        cache = model.run_with_cache(tokens)[1]
    for layer in capture(model, tokens):
        places, spec = torch.arange(tokens.shape[1]), layer.spec
        scores = spec.score(spec.rotated(layer.q, places), spec.rotated(layer.k, places))
        pattern = scores.masked_fill(~spec.mask(tokens.shape[1]), -torch.inf).softmax(-1)
        torch.testing.assert_close(pattern, cache["pattern", layer.layer], rtol=0, atol=1e-5)


@every_kind
def test_fits_are_those_of_a_model_whose_rotation_is_fixed(kind: str) -> None:
    tokens = zoo.random_tokens(KINDS[kind][0])
    one, other = (
        tp.additivity(zoo.as_bridge(varying(kind, fixed=fixed)), tokens, progress=False) for fixed in (False, True)
    )
    assert one["r"].notna().all()
    for column in one.select_dtypes("number"):
        close(torch.tensor(one[column].to_numpy()), torch.tensor(other[column].to_numpy()))


@every_kind
def test_swapped_positions_are_position_ids(kind: str) -> None:
    reference, tokens = varying(kind), zoo.random_tokens(KINDS[kind][0])
    bridge, places = zoo.as_bridge(copy.deepcopy(reference)), torch.arange(tokens.shape[1]).flip(0)
    with torch.no_grad():
        expected = reference(tokens, position_ids=places[None], attention_mask=torch.ones_like(tokens)).logits
        with applied(bridge, swap_positions(bridge, places)):
            close(bridge(tokens), expected)
        assert not torch.allclose(reference(tokens).logits, expected, atol=1e-2)


# --- beyond, whatever reads attention raises one sentence -----------------------------------------------------

ENTRIES: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "capture": lambda model, tokens, layer: capture(model, tokens),
    "additivity": lambda model, tokens, layer: tp.additivity(model, tokens, progress=False),
    "controlled distance": lambda model, tokens, layer: tp.controlled_distance(model, tokens, progress=False),
    "score sources": lambda model, tokens, layer: tp.score_sources(model, tokens[:1], (layer, 0), query=5),
    "content and position": lambda model, tokens, layer: ex.content_position_terms(model, tokens, layer),
    "length generalization": lambda model, tokens, layer: tp.length_generalization(
        model, tokens, [0, 5, tokens.shape[1]], layers=[layer], progress=False
    ),
    "patching": lambda model, tokens, layer: model.run_with_hooks(
        tokens, fwd_hooks=listen_vectors(read_model(model).specs(layer)[0], None, {})
    ),
}


CASES = [("longrope", entry) for entry in ENTRIES] + [(kind, "capture") for kind in KINDS if kind != "longrope"]


@pytest.mark.parametrize(("kind", "entry"), CASES)
def test_longer_texts_are_refused(kind: str, entry: str) -> None:
    limit, layer = KINDS[kind]
    model, tokens = zoo.as_bridge(varying(kind)), zoo.random_tokens(limit + 1)
    sentence = rf"tokens must be at most {limit} long for .*, got {limit + 1}: layer {layer} of \w+ rotates, scales or"
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        ENTRIES[entry](model, tokens, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_refuse_longer_texts(kind: str) -> None:
    limit, layer = KINDS[kind]
    model, tokens = zoo.as_bridge(varying(kind)), zoo.random_tokens(limit + 1)
    rotates = read_model(model).specs(layer)[0].rotary is not None
    hooks = tp.lambda_mask(model, 1, 4, 6) if rotates else tp.hooks.drop_component(model, "distance")
    sentence = rf"at most {limit} long.*, got {limit + 1}: layer {layer} of \w+ rotates, scales or masks longer"
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model.run_with_hooks(tokens, fwd_hooks=hooks)


def test_the_nearest_limit_is_named() -> None:
    """A text as long as it says is not refused in turn."""
    model, tokens = zoo.bridge("llama4"), zoo.random_tokens(20)
    with pytest.raises(ValueError, match="tokens must be at most 15 long for capture, got 20: layer 3 of Llama4"):
        capture(model, tokens)
    assert len(capture(model, tokens[:, :15])) == 4


def test_a_rotation_that_changes_in_an_unknown_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration tells of it: scores are compared with the model's in each pass."""
    model = zoo.bridge("llama-gqa")
    rotary = model.rotary_emb.original_component
    own = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        places = position_ids if position_ids.shape[-1] <= ORIGINAL else position_ids * 0.9
        return own(x, places)

    monkeypatch.setattr(rotary, "forward", forward)
    specs = read_model(model).specs()
    assert [(spec.limits.holds_to, spec.limits.problem) for spec in specs] == [(None, None)] * 2
    assert len(capture(model, zoo.random_tokens(ORIGINAL))) == 2
    tokens = zoo.random_tokens(100)
    with pytest.raises(ValueError, match="are not what its queries, keys and rotation give"):
        capture(model, tokens)
    with torch.no_grad(), contextlib.suppress(ValueError):  # hooks refuse the text, or follow the model
        close(model.run_with_hooks(tokens, fwd_hooks=remap_distance(model, lambda d: d)), model(tokens))


# --- the model stays as it was --------------------------------------------------------------------------------


def kept(model: Any) -> dict[str, Any]:
    """Every buffer and number of the model's modules."""
    return {
        f"{i}.{name}": x.clone() if isinstance(x, Tensor) else x
        for i, part in enumerate(modules(model))
        for name, x in {**vars(part), **part._buffers}.items()
        if isinstance(x, (int, float, Tensor, type(None)))
    }


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("length", [12, 100])
def test_reading_leaves_the_models_tables_as_they_are(kind: str, length: int) -> None:
    """Whatever the last text was: models keep the table of it."""
    model = zoo.as_bridge(varying(kind))
    with torch.no_grad():
        model(zoo.random_tokens(length))
    before = kept(model)
    read_model(model)
    after = kept(model)
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x, after[name]) if isinstance(x, Tensor) else x == after[name], name
