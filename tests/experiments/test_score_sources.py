"""Sources of one query's scores: against plain attention in float64, the model's own scores, and removed sources."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.lanes import slow
from support.small_models import small_model
from support.tolerance import of_rounded_weights
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    capture,
    demo_tokens,
    dummy_distance,
    limit_frequencies,
    load_demo_model,
    read_model,
    remap_distance,
    score_sources,
    swap_positions,
)
from tl_posdisent.models.running.model_parts import hook_name

Model = Callable[[str, str], Any]
CASES = zoo.cases("llama-gqa", "gptj", "gemma2", "olmo2", "llama-yarn", "gpt_oss", "gpt2")
TOKENS = zoo.random_tokens(length=10, batch=2)
SMALL = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(3))


def close(a: Tensor, b: Tensor, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol + rtol * float(b.abs().max()))


def model_scores(model: Any, layer: int, tokens: Tensor, hooks: Any = ()) -> Tensor:
    """``[batch, head, query, key]`` at the model's own hook."""
    found: list[Tensor] = []
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        model.run_with_hooks(
            tokens, fwd_hooks=[(hook_name(layer, "hook_attn_scores"), lambda x, hook: found.append(x.clone()))]
        )
    return found[0]


# --- against plain attention ----------------------------------------------------------------------------------------


def plain_parts(hf: Any, text: Tensor, distance: float) -> tuple[list[str], Tensor, Tensor]:
    """What a Llama of two layers has in layer 1, from its weights, in float64: the sources, and ``[piece, head, query,
    key, source of the query, source of the key, subspace]`` for the pieces content and distance."""
    c, n, heads, groups, theta = hf.config, 8, 8, 4, 500.0
    w = {name: x.detach().double() for name, x in hf.named_parameters()}
    places, frequency = torch.arange(len(text)).double(), theta ** (-torch.arange(n // 2).double() / (n // 2))

    def scale(x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt()

    def split(x: Tensor, layer: int, name: str) -> Tensor:
        """``[…, pos, head, d_head]`` of a normed stream."""
        x = x @ w[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T
        return x.unflatten(-1, (-1, n)).repeat_interleave(heads // (x.shape[-1] // n), -2)

    def turned(x: Tensor, at: Tensor) -> Tensor:
        """As complex numbers, turned by the angles of positions ``at``, one for each ``pos``."""
        return torch.complex(x[..., : n // 2], x[..., n // 2 :]) * torch.polar(
            torch.ones(len(at), 1, n // 2).double(), (at[:, None] * frequency)[:, None]
        )

    assert groups == c.num_key_value_heads
    x = w["model.embed_tokens.weight"][text]
    normed = x * scale(x) * w["model.layers.0.input_layernorm.weight"]
    q, k = (turned(split(normed, 0, name), places) for name in "qk")
    scores = torch.einsum("ihc,jhc->hij", q, k.conj()).real / math.sqrt(n)
    pattern = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
    z = torch.einsum("hij,jhd->ihd", pattern, split(normed, 0, "v"))
    outputs = torch.einsum("ihd,mhd->him", z, w["model.layers.0.self_attn.o_proj.weight"].unflatten(1, (heads, n)))
    middle = x + outputs.sum(0)
    read = middle * scale(middle) * w["model.layers.0.post_attention_layernorm.weight"]
    gate, up, down = (w[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    mlp = (torch.nn.functional.silu(read @ gate.T) * (read @ up.T)) @ down.T
    names = ["embedding", *(f"L0H{h}" for h in range(heads)), "L0 MLP"]
    parts = torch.stack([x, *outputs, mlp])
    frozen = parts * scale(parts.sum(0)) * w["model.layers.1.input_layernorm.weight"]
    q, k = split(frozen, 1, "q"), split(frozen, 1, "k")
    true = torch.einsum("aihc,bjhc->hijabc", turned(q, places), turned(k, places).conj()).real / math.sqrt(n)
    at = torch.full_like(places, distance)
    content = torch.einsum("aihc,bjhc->hijabc", turned(q, at), turned(k, 0 * at).conj()).real / math.sqrt(n)
    return names, content, true - content


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("distance", [0, 2.5])
def test_every_term_is_that_of_plain_attention(kind: str, distance: float) -> None:
    """Wavelengths are 6, 30, 140 and 664."""
    hf = zoo.hf_model("llama-gqa").double()
    names, content, added = plain_parts(hf, TOKENS[1], distance)
    atol = of_rounded_weights(hf, lambda: torch.cat([x.sum(-1) for x in plain_parts(hf, TOKENS[1], distance)[1:]]))
    model = zoo.load(kind, "llama-gqa")
    for head, query, keys in ((5, 9, [2, 9, 0]), (2, -1, None)):
        found = score_sources(model, TOKENS, (1, head), query, keys, text=1, distance=distance, wavelengths=(20, 200))
        assert found.sources == (*names, "bias")
        assert found.pieces == ("content", "distance_below_20", "distance_20_to_200", "distance_from_200")
        at = list(range(10)) if keys is None else keys
        bands = [content[head, 9, at].sum(-1), *(added[head, 9, at][..., x].sum(-1) for x in ([0], [1, 2], [3]))]
        wanted = torch.stack(bands, 1)
        close(found.terms()[:, :, :-1, :-1], wanted, atol=atol)
        assert not bool(found.terms()[:, :, -1].any() | found.terms()[..., -1].any())
        close(found.terms("query")[..., :-1], wanted.sum(-1), atol=atol)
        close(found.terms("key")[..., :-1], wanted.sum(-2), atol=atol)
        same = wanted.diagonal(dim1=-2, dim2=-1)
        close(found.terms("source")[..., :-1], wanted.sum(-1) + wanted.sum(-2) - same, atol=atol)
        close(found.terms(keys=[1])[0], found.terms()[1], 1e-12)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_terms_add_up_to_the_models_own_scores(kind: str, name: str, shared_model: Model) -> None:
    model = shared_model(kind, name)
    own, spec = model_scores(model, 1, TOKENS), read_model(model).specs(1)[0]
    for query, head in ((9, 3), (5, 6)):
        found = score_sources(model, TOKENS, (1, head), query, text=1, wavelengths=[40], distance=1)
        total = found.terms().sum((1, 2, 3))
        if spec.soft_cap is not None:
            total = spec.soft_cap * torch.tanh(total / spec.soft_cap)
        if spec.taps.scores is None:  # the hook has the pattern
            total = total.softmax(0)
        close(total, own[1, head, query, list(found.keys)], 1e-5)
        close(found.scores(), found.terms("query").sum((1, 2)), 1e-5)
        assert found.error() < 1e-5
        assert list(found.keys) == spec.sees(query - torch.arange(10)).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("keys_from", ["layer", "input"])
@pytest.mark.parametrize("encoding", ["rope", "absolute_rope", "learned", "none"])
@pytest.mark.parametrize("causal", [True, *slow([False])])
def test_in_float64_the_sum_is_exact(encoding: str, keys_from: str, causal: bool) -> None:
    model = small_model(encoding=encoding, keys_from=keys_from, causal=causal, n_layers=3).double()
    for layer in range(3):
        found = score_sources(model, SMALL, (layer, 2), 4, text=2)
        own = model_scores(model, layer, SMALL)[2, 2, 4, : 5 if causal else 9]
        assert f" (text 2 of {len(SMALL)}), {len(own)} keys" in repr(found)
        (seen,) = capture(model, SMALL, layers=[layer])
        close(found.query_parts.sum(0), seen.q[2, 4, 2], 1e-13)
        close(found.key_parts.sum(0), seen.k[2, : len(own), 2], 1e-13)
        close(found.terms().sum((1, 2, 3)), own, 1e-6 if "rope" in encoding else 1e-13)  # its tables are float32
        assert ("positional embedding" in found.sources) == (encoding in ("absolute_rope", "learned"))
        if "rope" not in encoding:
            assert not bool(found.terms()[:, 1].any())  # nothing that the distance adds
        elif layer:
            assert bool(found.terms()[:, 1].any())


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_positional_embedding_is_a_source(kind: str) -> None:
    model = zoo.load(kind, "gpt2")
    found = score_sources(model, TOKENS, "L0H3", 7, keys=[1, 5])
    hf = zoo.hf_model("gpt2").transformer
    place, word = hf.wpe.weight.detach().double(), hf.wte.weight.detach().double()[TOKENS[0]]
    stream = word + place[:10]
    norm = hf.h[0].ln_1
    factor = (stream.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt() * norm.weight.detach().double()

    def part(x: Tensor, column: int) -> Tensor:
        """Head 3's part of queries (0) or keys (1)."""
        weight = hf.h[0].attn.c_attn.weight.detach().double()[:, column * 64 + 24 : column * 64 + 32]
        return (x - x.mean(-1, keepdim=True)) * factor @ weight

    assert found.sources == ("embedding", "positional embedding", "bias")
    terms = found.terms()[:, 0]
    for a, query in enumerate((word, place[:10])):
        for b, key in enumerate((word, place[:10])):
            close(terms[:, a, b], part(key, 1)[[1, 5]] @ part(query, 0)[7] / math.sqrt(8), 1e-5)


# --- against interventions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0, 3, 40.5])
def test_content_is_the_score_at_a_dummy_distance(distance: float, shared_model: Model) -> None:
    model = shared_model("bridge", "llama-gqa")
    found = score_sources(model, TOKENS, "L1H5", 9, distance=distance)
    changed = model_scores(model, 1, TOKENS, dummy_distance(model, distance, layers=[1]))
    close(found.terms("query")[:, 0].sum(-1), changed[0, 5, 9], 1e-5)


def test_bands_are_those_of_limited_frequencies(shared_model: Model) -> None:
    """All other frequencies frozen, the scores are content and the band."""
    model = shared_model("bridge", "llama-gqa")
    found = score_sources(model, TOKENS, "L1H5", 9, wavelengths=[20, 200]).terms("key").sum(-1)
    for band, (low, high) in enumerate(((20, 0), (200, 20), (math.inf, 200)), 1):
        ends = (2 * math.pi / low, 2 * math.pi / high if high else None)
        hooks = limit_frequencies(model, *ends, mode="freeze", layers=[1])
        close(found[:, 0] + found[:, band], model_scores(model, 1, TOKENS, hooks)[0, 5, 9], 1e-5)


def test_a_difference_is_the_logarithm_of_a_ratio_of_attention() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=48)
    found = score_sources(model, tokens, "L3H1", 40, [39, 12, 20], against=20)
    with torch.no_grad():
        pattern = model.run_with_cache(tokens)[1]["pattern", 3][0, 1, 40].double()
    close(found.scores(), (pattern[[39, 12, 20]] / pattern[20]).log(), 1e-5)
    close(found.terms("pair").sum((1, 2, 3)), found.scores(), 1e-5)
    plain = score_sources(model, tokens, "L3H1", 40, [39, 12, 20])
    for by in ("pair", "query", "key", "source"):
        close(found.terms(by), plain.terms(by) - plain.terms(by)[-1:], 1e-12)
    assert not bool(found.terms()[-1].any())


@pytest.mark.parametrize(
    "make",
    [
        lambda model: dummy_distance(model, 3),
        lambda model: remap_distance(model, lambda d: d.clamp(max=2)),
        lambda model: swap_positions(model, torch.arange(10).flip(0)),
        lambda model: limit_frequencies(model, 0.1),
    ],
)
def test_changed_positions_are_refused(make: Callable[[Any], Any], shared_model: Model) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = model(TOKENS)
    with (
        model.hooks(fwd_hooks=make(model)),
        pytest.raises(ValueError, match="are not what its queries, keys"),
    ):
        score_sources(model, TOKENS, "L1H3", 9)
    assert torch.equal(model(TOKENS), before)


def test_hooks_of_the_user_act() -> None:
    """An ablated head of an earlier layer has no terms; distances of an earlier layer change what its heads add."""
    model = small_model(encoding="rope", causal=True).double()
    with model.hooks(fwd_hooks=ablate_heads(model, [(0, 1)])):
        found = score_sources(model, SMALL, "L1H0", 8)
    assert not bool(found.terms("source")[..., found.sources.index("L0H1")].any())
    assert found.error() < 1e-6
    hooks = dummy_distance(model, 1, layers=[0])
    with model.hooks(fwd_hooks=hooks):
        found = score_sources(model, SMALL, "L1H0", 8)
    close(found.terms().sum((1, 2, 3)), model_scores(model, 1, SMALL, hooks)[0, 0, 8], 1e-6)


# --- removed sources ------------------------------------------------------------------------------------------------


def added(model: Any, tokens: Tensor, source: str, scales: list[Any]) -> Tensor:
    """What an embedding, a head or an MLP of layer 0 adds to the stream of a ``HookedTransformer``.

    Behind a norm after the attention, with its scale held by the hooks ``scales``.
    """
    with torch.no_grad():
        cache = model.run_with_cache(tokens)[1]
    if source == "embedding":
        return cache["blocks.0.hook_resid_pre"]
    if source == "L0 MLP":
        return cache["blocks.0.hook_mlp_out"]

    def attention(head: int) -> Tensor:
        """The output of the layer's attention with one head alone, or none (-1)."""
        outputs: list[Tensor] = []
        hooks = [
            ("blocks.0.attn.hook_z", lambda z, hook: z * (torch.arange(z.shape[2]) == head)[:, None]),
            ("blocks.0.hook_attn_out", lambda x, hook: outputs.append(x.clone())),
        ]
        with torch.no_grad(), model.hooks(fwd_hooks=scales):
            model.run_with_hooks(tokens, fwd_hooks=hooks)
        return outputs[0]

    return attention(int(source.removeprefix("L0H"))) - attention(-1)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gemma2", "olmo2"))
def test_with_frozen_norms_the_score_falls_by_the_term(name: str) -> None:
    """HookedTransformer's own hooks hold every scale; without them the score falls by what ``removed`` says."""
    model, names = zoo.hooked(name), ["embedding", "L0H2", "L0H5", "L0 MLP"]
    found = score_sources(model, TOKENS, "L1H3", 9, [8, 3], remove=names)
    held: dict[str, Tensor] = {}

    def freeze(x: Tensor, hook: Any) -> Tensor:
        return held.setdefault(hook.name, x.clone())

    scales = [(key, freeze) for key in model.hook_dict if key.endswith("hook_scale") and "ln_final" not in key]
    cap = read_model(model).specs(1)[0].soft_cap

    def scores(hooks: list[Any]) -> Tensor:
        """Before a soft cap."""
        x = model_scores(model, 1, TOKENS, hooks)[0, 3, 9, [8, 3]].double()
        return x if cap is None else cap * (x / cap).atanh()

    own = scores(scales)  # the hooks hold the scales of this run
    for source in names:
        part = added(model, TOKENS, source, scales)
        without = [("blocks.1.hook_resid_pre", lambda x, hook, part=part: x - part)]
        term = found.terms("source")[..., found.sources.index(source)].sum(-1)
        close(own - scores([*scales, *without]), term, 1e-4)
        falls = own - scores(without)
        close(found.removed[source], falls, 1e-4)
        assert float((falls - term).abs().max()) > 1e-3  # the norms' response is no rounding


def test_removal_from_a_difference() -> None:
    model = small_model(encoding="rope", causal=True).double()
    both = score_sources(model, SMALL, "L1H0", 8, [2, 5], remove="L0H1")
    one = score_sources(model, SMALL, "L1H0", 8, 2, against=5, remove="L0H1")
    close(one.removed["L0H1"], both.removed["L0H1"][:1] - both.removed["L0H1"][1:], 1e-12)
    table = one.to_frame("source", top=None).set_index("source")
    assert table.loc["L0H1", "removed"] == pytest.approx(float(one.removed["L0H1"]))
    assert table["removed"].notna().sum() == 1
    with torch.no_grad():
        z = model.run_with_cache(SMALL)[1]["z", 0]
    part = z[:, :, 1] @ model.blocks[0].attn.W_O[1]
    without = [("blocks.1.hook_resid_pre", lambda x, hook: x - part)]
    own, now = model_scores(model, 1, SMALL), model_scores(model, 1, SMALL, without)
    close(both.removed["L0H1"], (own - now)[0, 0, 8, [2, 5]], 1e-12)


# --- texts, tables, pictures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Granite", "GraniteMoe"])
def test_a_multiple_of_each_layer_is_added_to_the_stream(family: str) -> None:
    """Granite's residual multiplier: against Hugging Face's own weights."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    scales = {"residual_multiplier": 0.22, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
    own = {"vocab_size": 61, "intermediate_size": 96, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    own |= {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "GraniteMoe" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **scales, **own, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        zoo.randomise(plain, 0.2, 0.7)
    query, key = (getattr(plain.model.layers[1].self_attn, f"{x}_proj").weight.detach().double() for x in "qk")
    output = plain.model.layers[0].self_attn.o_proj.weight.detach().double()
    gain = plain.model.layers[1].input_layernorm.weight.detach().double()
    model, text = zoo.as_bridge(plain), torch.tensor([[5, 9, 4, 7]])
    found = score_sources(model, text, "L1H5", 3)
    with torch.no_grad():
        _, cache = model.run_with_cache(text)
    own_scores = model_scores(model, 1, text)[0, 5, 3]
    close(found.terms().sum((1, 2, 3)), own_scores, 1e-5)
    stream, z = cache["blocks.1.hook_resid_pre"][0].double(), cache["z", 0][0].double()
    factor = gain / stream.square().mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
    added = {"embedding": cache["blocks.0.hook_resid_pre"][0].double()}
    added |= {f"L0H{head}": 0.22 * z[:, head] @ output.view(64, 8, 8)[:, head].T for head in range(8)}
    for source, x in added.items():
        at, x = found.sources.index(source), factor * x
        torch.testing.assert_close(found.query_parts[at], (x @ query.T).view(4, 8, 8)[3, 5], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.key_parts[at], (x @ key.T).view(4, 4, 8)[:, 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_the_text(side: str) -> None:
    model = small_model(encoding="absolute_rope", causal=True).double()
    mask = torch.ones_like(SMALL)
    mask[1, slice(3) if side == "left" else slice(6, 9)] = 0
    found = score_sources(model, SMALL, "L1H0", -1, text=1, attention_mask=mask)
    alone = score_sources(model, SMALL[1:2, mask[1].bool()], "L1H0", 5)
    assert found.keys == (0, 1, 2, 3, 4, 5)
    assert found.query == 5
    close(found.terms(), alone.terms(), 1e-12)


def test_tables() -> None:
    model = small_model(encoding="rope", causal=True).double()
    found = score_sources(model, SMALL, "L1H0", 8, [7, 2, 8], wavelengths=[10])
    pairs = found.to_frame(top=None)
    place, sides = ["layer", "head", "query", "token"], ["query_source", "key_source"]
    pieces = ["content", "distance_below_10", "distance_from_10"]
    assert list(pairs) == ["key", *sides, *place, "score", "error", *pieces, "term"]
    assert len(pairs) == 3 * len(found.sources) ** 2
    assert pairs["key"].drop_duplicates().tolist() == [7, 2, 8]
    for row in pairs[::7].itertuples():
        a, b = found.sources.index(row.query_source), found.sources.index(row.key_source)
        assert row.term == pytest.approx(float(found.terms()[[7, 2, 8].index(row.key), :, a, b].sum()))
    for by, names in (("pair", sides), ("query", sides[:1]), ("key", sides[1:])):
        for top in (None, 2):
            table = found.to_frame(by, top=top)
            sums = table.groupby("key", sort=False)
            assert sums["term"].sum().tolist() == pytest.approx(found.scores().tolist())
            assert table[pieces].sum(axis=1).tolist() == pytest.approx(table["term"].tolist())
            assert (table[names].iloc[-1] == "others").all() == (top is not None)
            assert all(x["term"][:top].abs().is_monotonic_decreasing for _, x in sums)
    source = found.to_frame("source", top=1)
    first = source["source"].iloc[0]
    taking_part = pairs[(pairs["key"] == 7) & ((pairs[sides] == first).any(axis=1))]
    assert source["term"].iloc[0] == pytest.approx(taking_part["term"].sum())
    assert len(source) == 3
    assert "7" in repr(found)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("remove", [(), ["L0H1", "L0 MLP"]])
def test_the_cost_is_four_passes_and_one_for_each_source_to_remove(remove: list[str], shared_reading: Any) -> None:
    reading, begun = shared_reading("bridge", "llama-gqa"), list[int]()
    tokens = torch.randint(3, 60, (1, 64), generator=torch.Generator().manual_seed(0))
    handle = reading.model.blocks[0].register_forward_pre_hook(
        lambda block, inputs: begun.append(inputs[0][..., 0].numel())
    )
    try:
        score_sources(reading, tokens, "L1H3", 60, remove=remove)
    finally:
        handle.remove()
    assert begun == [64] * (4 + len(remove))  # d_model is 64


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": 9}, "query must be .* 9"),
        ({"keys": 5, "query": 4}, "keys must be positions that query 4 sees in layer 1, 0 to 4, got 5"),
        ({"keys": []}, "keys must name at least one"),
        ({"against": 8, "query": 4}, "against must be positions that query 4 sees in layer 1, 0 to 4, got 8"),
        ({"wavelengths": [8, 4]}, "wavelengths must be ascending numbers above 0"),
        ({"remove": "L1H0"}, "remove must be sources of the stream before layer 1, such as 'embedding' or 'L0 MLP'"),
        ({"remove": [3]}, "remove must be names of sources"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    model = small_model(encoding="rope", causal=True)
    with pytest.raises(ValueError, match=message):
        score_sources(model, SMALL, **{"head": "L1H0", "query": 8} | changed)


def test_keys_beyond_the_window_are_refused(shared_model: Model) -> None:
    with pytest.raises(ValueError, match="keys must be positions that query 9 sees in layer 1, 4 to 9, got 3"):
        score_sources(shared_model("bridge", "mistral"), TOKENS, "L1H0", 9, 3)


def test_keys_that_only_the_input_determines_cannot_lose_a_source() -> None:
    model = small_model(encoding="rope", causal=True, keys_from="input")
    with pytest.raises(ValueError, match="remove must be empty for keys that"):
        score_sources(model, SMALL, "L1H0", 8, remove="L0H1")


@pytest.mark.parametrize(("encoding", "message"), [("mla", "affine function"), ("alibi", "bias"), ("t5", "bias")])
def test_other_scores_are_refused(encoding: str, message: str) -> None:
    model = small_model(encoding=encoding, causal=True)
    with pytest.raises(ValueError, match=message):
        score_sources(model, SMALL, "L1H0", 8)


GATED = "attention whose output is a linear function of hook_z, added as it is or after a norm"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blocks.0.hook_resid_post",
            "in layer 0 of .*, a residual stream to which attention and MLP outputs are added",
        ),
        ("blocks.0.hook_attn_out", f"in layer 0 of .*, {GATED}"),
        ("blocks.1.attn.hook_q", "score_sources needs queries that are an affine function"),
    ],
)
def test_hooks_that_break_the_sum_are_refused(name: str, message: str) -> None:
    model = small_model(encoding="rope", causal=True)
    before = model(SMALL)
    with model.hooks(fwd_hooks=[(name, lambda x, hook: x.sin() + x)]), pytest.raises(ValueError, match=message):
        score_sources(model, SMALL, "L1H0", 8)
    assert torch.equal(model(SMALL), before)


def test_a_hook_that_does_not_fire_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(encoding="rope", causal=True)
    monkeypatch.setitem(vars(model.blocks[0].hook_attn_out), "_call_impl", lambda x: x)
    with pytest.raises(ValueError, match=r"needs, in layer 0 of .*, the hook blocks\.0\.hook_attn_out to fire"):
        score_sources(model, SMALL, "L1H0", 8)


def test_attention_with_a_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(encoding="rope", causal=True)
    attention, own = model.blocks[0].attn, model.blocks[0].attn.forward
    monkeypatch.setitem(vars(attention), "forward", lambda x, *more: own(x, *more) * x.sigmoid())
    with pytest.raises(ValueError, match=GATED):
        score_sources(model, SMALL, "L1H0", 8)


def test_norms_of_latents_are_refused(shared_model: Model) -> None:
    with pytest.raises(ValueError, match=r"score_sources needs queries .* behind the norms of latents"):
        score_sources(shared_model("bridge", "deepseek_v3"), TOKENS, "L1H0", 8)
