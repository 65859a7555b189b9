"""The distance profile as a sum over sources: against the dense tensor, the model's weights and frozen scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.rotary_layers import all_scores
from support.small_models import small_model
from torch import Tensor

from tl_posdisent import ablate_heads, capture, controlled_distance, distance_sources, read_attention
from tl_posdisent.experiments import DistanceSources
from tl_posdisent.rope import Rotary
from tl_posdisent.viz import plot_distance_sources

Model = Callable[[str, str], Any]
CASES = zoo.cases("llama-gqa", "gptj", "gemma2", "olmo2", "llama-yarn", "neox", "qwen3", "falcon", "gpt_oss")
TOKENS = zoo.random_tokens(length=10, batch=2)
SMALL = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(3))
DISTANCES = [0, 1, 2, 5, 40.5]
QK = ("q_proj", "k_proj")


def mean_score(model: Any, tokens: Tensor, layer: int, sinks: int = 0) -> Tensor:
    """``[head, distance]`` of the dense tensor of all scores at all distances."""
    (seen,) = capture(model, tokens, layers=[layer], scores=False)
    q, k = seen.q[:, sinks:], seen.k[:, sinks:]
    return all_scores(q, k, seen.spec.rotary, DISTANCES, seen.spec.scale).mean((2, 3))


def product(q: Tensor, k: Tensor, rotary: Rotary, scale: float) -> Tensor:
    """``[head, distance]`` of one query and one key per head, by the dense oracle."""
    return all_scores(q[None], k[None], rotary, DISTANCES, scale)[:, :, 0, 0]


def close(a: Tensor, b: Tensor, rtol: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=rtol * float(b.abs().max()))


# --- the sum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_terms_add_up_to_the_profile(kind: str, name: str, shared_model: Model) -> None:
    model, sinks = shared_model(kind, name), 2
    found = distance_sources(model, TOKENS, 1, distances=DISTANCES, sinks=sinks)
    wanted = mean_score(model, TOKENS, 1, sinks)
    close(found.profile(), wanted, 1e-6)
    close(sum_of_terms(found), wanted, 1e-5)
    assert float(found.error().max()) < 1e-5
    assert found.sources[0] == "embedding"
    assert found.sources[-1] == "bias"
    assert [x for x in found.sources if x.startswith("L0H")] == [f"L0H{head}" for head in range(model.cfg.n_heads)]
    assert found.shares().sum((1, 2)).tolist() == pytest.approx([1] * model.cfg.n_heads, abs=1e-9)


def sum_of_terms(found: DistanceSources) -> Tensor:
    total = torch.zeros_like(found.profile())
    for a in found.sources:
        for b in found.sources:
            total += found.term(a, b)
    return total


@pytest.mark.parametrize("keys_from", ["layer", "input"])
@pytest.mark.parametrize("encoding", ["rope", "absolute_rope"])
@pytest.mark.parametrize("causal", [True, False])
def test_in_float64_the_sum_is_exact(encoding: str, keys_from: str, causal: bool) -> None:
    model = small_model(encoding=encoding, keys_from=keys_from, causal=causal, n_layers=3).double()
    for layer in range(3):
        found = distance_sources(model, SMALL, layer, distances=DISTANCES)
        close(found.total(), mean_score(model, SMALL, layer), 1e-13)
        close(sum_of_terms(found), found.profile(), 1e-13)
        assert float(found.error().max()) < 1e-13


def test_the_profile_is_the_distance_effect(shared_model: Model) -> None:
    model = shared_model("bridge", "llama-gqa")
    table = controlled_distance(model, TOKENS, distances=DISTANCES, layers=1, progress=False)
    profile = distance_sources(model, TOKENS, 1, distances=DISTANCES).profile()
    variance = (table["distance"] * table["total"]).tolist()
    assert profile.var(-1, correction=0).tolist() == pytest.approx(variance, rel=1e-6)
    assert profile.mean(-1).tolist() == pytest.approx(table["mean"].tolist(), rel=1e-5, abs=1e-6)


# --- each source ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma2", "olmo2", "neox"])
def test_each_source_with_frozen_scales(name: str) -> None:
    """HookedTransformer's own hooks hold every scale while one source alone is put into the stream."""
    model = zoo.hooked(name)
    found = distance_sources(model, TOKENS, 1, distances=DISTANCES)
    spec = read_attention(model, 1)
    taps, held = [spec.taps.q, spec.taps.k], {}

    def freeze(x: Tensor, hook: Any) -> Tensor:
        return held.setdefault(hook.name, x.clone())

    scales = [(key, freeze) for key in model.hook_dict if key.endswith("hook_scale") and "ln_final" not in key]
    with torch.no_grad(), model.hooks(fwd_hooks=scales):
        cache = model.run_with_cache(TOKENS)[1]  # keeps them
        zero = torch.zeros_like(cache["blocks.0.hook_resid_pre"])

        def vectors(x: Tensor) -> list[Tensor]:
            with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda old, hook: x)]):
                return _frozen_vectors(model, taps, scales)

        def attention(kept: int | None) -> Tensor:
            def alone(z: Tensor, hook: Any) -> Tensor:
                return z * (torch.arange(z.shape[2]) == (-1 if kept is None else kept))[:, None]

            found = []
            hooks = [
                ("blocks.0.attn.hook_z", alone),
                ("blocks.0.hook_attn_out", lambda x, hook: found.append(x.clone())),
            ]
            model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            return found[0]

        bias = attention(None)
        parts = {
            "embedding": cache["blocks.0.hook_resid_pre"],
            "L0 bias": bias,
            "L0 MLP": cache["blocks.0.hook_mlp_out"],
        }
        parts |= {f"L0H{head}": attention(head) - bias for head in range(model.cfg.n_heads)}
        nothing = vectors(zero)
        for source in found.sources:
            q, k = (
                nothing if source == "bias" else (x - y for x, y in zip(vectors(parts[source]), nothing, strict=True))
            )
            k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            at = found.sources.index(source)
            close(found.query[at], q.double().mean((0, 1)), 1e-4)
            close(found.key[at], k.double().mean((0, 1)), 1e-4)


def _frozen_vectors(model: Any, taps: list[Any], scales: list[Any]) -> list[Tensor]:
    """Queries and keys of layer 1 before rotation and after any QK-norm, scales held."""
    found: dict[str, Tensor] = {}
    hooks = [(tap.name, lambda x, hook: found.update({hook.name: x.clone()})) for tap in taps]
    with model.hooks(fwd_hooks=scales):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        return [tap.read(found[tap.name]) for tap in taps]


@pytest.mark.parametrize("family", ["Granite", "GraniteMoe"])
def test_a_multiple_of_each_layer_is_added_to_the_stream(family: str) -> None:
    """Granite's residual multiplier: against Hugging Face's own weights, and all pairs of plain queries and keys."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    scales = {"residual_multiplier": 0.22, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
    own = {"vocab_size": 61, "intermediate_size": 96, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    own |= {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "GraniteMoe" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **scales, **own, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        zoo.randomise(plain, 0.2, 0.7)
    query, key = (getattr(plain.model.layers[1].self_attn, name).weight.detach().double() for name in QK)
    output = plain.model.layers[0].self_attn.o_proj.weight.detach().double()
    gain = plain.model.layers[1].input_layernorm.weight.detach().double()
    model = zoo.as_bridge(plain)
    found = distance_sources(model, torch.tensor([[5, 9, 4, 7]]), 1)
    with torch.no_grad():
        _, cache = model.run_with_cache(torch.tensor([[5, 9, 4, 7]]))

    def turned(x: Tensor, distance: int) -> Tensor:
        angle = distance * 500.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        a, b = x.split(4, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    q, k = (cache[name, 1][0].double() for name in ("q", "k"))
    for head in range(8):
        pairs = [0.2 * turned(q[:, head], d) @ k[:, head // 2].T for d in range(4)]
        torch.testing.assert_close(found.profile()[head], torch.stack([x.mean() for x in pairs]), rtol=1e-5, atol=1e-6)
    close(sum_of_terms(found), found.profile(), 1e-5)

    stream, z = cache["blocks.1.hook_resid_pre"][0].double(), cache["z", 0][0].double()
    factor = gain / stream.square().mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
    added = {"embedding": cache["blocks.0.hook_resid_pre"][0].double()}
    added |= {f"L0H{head}": 0.22 * z[:, head] @ output.view(64, 8, 8)[:, head].T for head in range(8)}
    for source, x in added.items():
        at, x = found.sources.index(source), factor * x
        torch.testing.assert_close(found.query[at], (x @ query.T).mean(0).view(8, 8), rtol=1e-4, atol=1e-5)
        keys = (x @ key.T).mean(0).view(4, 8).repeat_interleave(2, 0)
        torch.testing.assert_close(found.key[at], keys, rtol=1e-4, atol=1e-5)


def test_padded_texts_are_pooled() -> None:
    model = small_model(encoding="rope", causal=True).double()
    lengths = [9, 5, 9, 7]
    tokens = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    found = distance_sources(model, tokens, 1, attention_mask=mask, distances=DISTANCES, sinks=2)
    alone = [
        distance_sources(model, tokens[at : at + 1, :n], 1, distances=DISTANCES, sinks=2)
        for at, n in enumerate(lengths)
    ]
    weights = [(n - 2) / (sum(lengths) - 8) for n in lengths]
    for side in ("query", "key", "own_query", "own_key"):
        pooled = sum(w * getattr(one, side) for w, one in zip(weights, alone, strict=True))
        assert isinstance(pooled, Tensor)
        close(getattr(found, side), pooled, 1e-12)


def test_hooks_of_the_user_act() -> None:
    """An ablated head of an earlier layer is no source."""
    model = small_model(encoding="rope", causal=True).double()
    with model.hooks(fwd_hooks=ablate_heads(model, [(0, 1)])):
        found = distance_sources(model, SMALL, 1)
    at = found.sources.index("L0H1")
    assert not bool(found.query[at].any())
    assert bool(found.query[at + 1].all())
    assert float(found.error().max()) < 1e-13


# --- tables ---------------------------------------------------------------------------------------------------------


def test_shares_are_covariances() -> None:
    model = small_model(encoding="rope", causal=True).double()
    found = distance_sources(model, SMALL, 1, distances=DISTANCES, heads=[2, 0])
    assert found.heads == (2, 0)
    profile = found.total()
    for a, query in enumerate(found.sources):
        for b, key in enumerate(found.sources):
            term = product(found.query[a], found.key[b], found.rotary, found.scale)
            close(found.term(query, key), term, 1e-12)
            for at in range(2):
                pair = torch.stack([term[at], profile[at]])
                covariance = torch.cov(pair, correction=0)
                assert float(found.shares()[at, a, b]) == pytest.approx(float(covariance[0, 1] / covariance[1, 1]))
    table = found.to_frame()
    assert len(table) == 2 * len(found.sources) ** 2
    assert table.columns.tolist() == ["layer", "head", "query_source", "key_source", "share", "error"]
    assert table["head"].drop_duplicates().tolist() == [2, 0]
    assert all(part["share"].abs().is_monotonic_decreasing for _, part in table.groupby("head"))
    by_query = found.to_frame("query").set_index(["head", "query_source"])["share"]
    pairs = table.groupby(["head", "query_source"])["share"].sum()
    assert by_query.sort_index().tolist() == pytest.approx(pairs.sort_index().tolist())
    source = found.to_frame("source", top=1)
    taking_part = table[(table["query_source"] == source["source"][0]) | (table["key_source"] == source["source"][0])]
    assert source["share"][0] == pytest.approx(taking_part[taking_part["head"] == 2]["share"].sum())


def test_a_profile_that_does_not_vary_has_no_shares() -> None:
    model = small_model(encoding="rope", causal=True).double()
    found = distance_sources(model, SMALL, 1, distances=[3])
    assert bool(found.shares().isnan().all())
    assert float(found.error().max()) < 1e-13


def test_plot() -> None:
    found = distance_sources(small_model(encoding="rope", causal=True), SMALL, 1)
    figure = plot_distance_sources(found.to_frame(), head=1, top=20)
    assert list(figure.data[0].x) == list(figure.data[0].y) == list(found.sources)
    torch.testing.assert_close(torch.tensor(figure.data[0].z), found.shares()[1])
    few = plot_distance_sources(found.to_frame(), head=1, top=2)
    largest = found.shares()[1].abs()
    best = torch.maximum(largest.amax(0), largest.amax(1)).argsort(descending=True)[:2]
    assert set(few.data[0].x) == {found.sources[i] for i in best}
    with pytest.raises(ValueError, match=r"head must be one of the table's, .*got None"):
        plot_distance_sources(found.to_frame())
    with pytest.raises(ValueError, match="top must be an integer"):
        plot_distance_sources(found.to_frame(), head=0, top=0)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_latent_attention_is_refused(shared_model: Model) -> None:
    model = small_model(encoding="mla", causal=True)
    with pytest.raises(ValueError, match="distance_sources needs queries that are an affine function"):
        distance_sources(model, SMALL, 1)
    if ("bridge", "deepseek_v3") in [case.values for case in zoo.cases("deepseek_v3")]:
        with pytest.raises(ValueError, match=r"distance_sources needs queries .* behind the norms of latents"):
            distance_sources(shared_model("bridge", "deepseek_v3"), TOKENS, 1)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
def test_without_rotation_that_is_read(kind: str, name: str, shared_model: Model) -> None:
    with pytest.raises(ValueError, match="distance_sources needs rotary position embeddings"):
        distance_sources(shared_model(kind, name), TOKENS, 1)


GATED = "attention whose output is a linear function of hook_z, added as it is or after a norm"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blocks.0.hook_resid_post",
            "in layer 0 of .*, a residual stream to which attention and MLP outputs are added",
        ),
        ("blocks.0.hook_attn_out", f"in layer 0 of .*, {GATED}"),
        ("blocks.1.attn.hook_q", "distance_sources needs queries that are an affine function"),
    ],
)
def test_hooks_that_break_the_sum_are_refused(name: str, message: str) -> None:
    model = small_model(encoding="rope", causal=True)
    before = model(SMALL)
    with model.hooks(fwd_hooks=[(name, lambda x, hook: x.sin() + x)]), pytest.raises(ValueError, match=message):
        distance_sources(model, SMALL, 1)
    assert torch.equal(model(SMALL), before)


def test_a_hook_that_does_not_fire_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(encoding="rope", causal=True)
    monkeypatch.setitem(vars(model.blocks[0].hook_attn_out), "_call_impl", lambda x: x)
    with pytest.raises(ValueError, match=r"needs, in layer 0 of .*, the hook blocks\.0\.hook_attn_out to fire"):
        distance_sources(model, SMALL, 1)


def test_attention_with_a_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(encoding="rope", causal=True)
    attention, own = model.blocks[0].attn, model.blocks[0].attn.forward
    monkeypatch.setitem(vars(attention), "forward", lambda x, *more: own(x, *more) * x.sigmoid())
    with pytest.raises(ValueError, match=GATED):
        distance_sources(model, SMALL, 1)
