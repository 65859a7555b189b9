"""Terms of content and position add up, are what is written down by hand, and vanish where they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.linalg import subspace_angles
from support import zoo
from support.small_models import small_model
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import dummy_distance
from tl_posdisent.experiments import content_position_terms, positional_subspace, rope_hadamard
from tl_posdisent.experiments.residual_stream.content_position import SOURCES, TERMS
from tl_posdisent.synthetic import SyntheticModel

ADDITIVE = ("none", "sinusoidal", "learned", "t5", "alibi", "rope", "absolute_rope")
TOKENS = torch.randint(1, 20, (5, 9), generator=torch.Generator().manual_seed(3))
ZOO_TOKENS = zoo.random_tokens(12, 4)


def own_scores(model: Any, tokens: Tensor, layer: int) -> Tensor:
    name = f"blocks.{layer}.attn.hook_attn_scores"
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=name)[1][name].double()


def latin(n: int) -> Tensor:
    """n texts in which every token stands at every place once."""
    return (torch.arange(n)[:, None] + torch.arange(n)) % n + 1


def assert_close(a: Tensor, b: Tensor, atol: float | None = None) -> None:
    """By default, of scores: three sums in turn are rounded, queries, keys and their products."""
    atol = rounding(b, 3) if atol is None else atol
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


# --- they add up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2", "bloom", "llama-yarn", "deepseek_v3"))
def test_terms_add_up_to_the_scores(kind: str, name: str, layer: int, shared_model: Callable[[str, str], Any]) -> None:
    model = shared_model(kind, name)
    check_sum(model, ZOO_TOKENS, layer)


@pytest.mark.parametrize(("causal", "keys_from"), [(True, "layer"), (False, "input")])
@pytest.mark.parametrize("encoding", ADDITIVE)
def test_terms_of_synthetic_models_add_up(encoding: str, causal: bool, keys_from: str) -> None:
    check_sum(small_model(encoding=encoding, causal=causal, keys_from=keys_from, read_out="token"), TOKENS, 1)


def check_sum(model: Any, tokens: Tensor, layer: int) -> None:
    terms, scores = content_position_terms(model, tokens, layer), own_scores(model, tokens, layer)
    total = sum(terms.term(name) for name in TERMS)
    assert isinstance(total, Tensor)
    assert_close(total[..., terms.mask], scores[..., terms.mask])
    assert_close(terms.scores(), total, 1e-12)
    assert bool((total[..., ~terms.mask] == 0).all())
    table = terms.to_frame()
    assert table["term"].tolist() == list(TERMS) * scores.shape[1]
    assert table.groupby("head")["share"].sum().tolist() == pytest.approx([1] * scores.shape[1], abs=1e-9)


# --- and are what they are called ---------------------------------------------------------------------------------


@pytest.mark.parametrize("grand_mean", ["content", "bias"])
@pytest.mark.parametrize("keys_from", ["layer", "input"])
@pytest.mark.parametrize("encoding", ["learned", "alibi", "absolute_rope"])
def test_terms_by_hand(encoding: str, keys_from: str, grand_mean: Any) -> None:
    model = small_model(encoding=encoding, keys_from=keys_from, causal=True).double()
    terms = content_position_terms(model, TOKENS, 1, grand_mean=grand_mean)
    with torch.no_grad():
        cache = model.run_with_cache(TOKENS)[1]
    block = model.blocks[1]
    asked = (cache["resid_pre", 1], block.ln1, block.attn.W_Q, block.attn.b_Q)
    looked_at = (
        (cache["resid_pre", 0], block.ln_source, block.attn.W_K, block.attn.b_K)
        if keys_from == "input"
        else (cache["resid_pre", 1], block.ln1, block.attn.W_K, block.attn.b_K)
    )
    query, key = (_parts_by_hand(model, *side, grand_mean) for side in (asked, looked_at))
    for a, one in enumerate(SOURCES):
        for b, other in enumerate(SOURCES):
            expected = torch.einsum("bqhd,bkhd->bhqk", query[a], key[b]) / 8**0.5
            got = terms.term(f"{one}:{other}")
            assert_close(got[..., terms.mask], expected[..., terms.mask], 1e-5)
    bias = model.encoding.bias(9)
    expected = torch.zeros(3, 9, 9) if bias is None else bias
    assert_close(terms.attention_bias, expected.tril(), 1e-6)
    assert_close(terms.position, cache["resid_pre", 1].mean(0) - cache["resid_pre", 1].mean((0, 1)), 1e-12)


def test_terms_of_latent_attention_by_hand(shared_model: Callable[[str, str], Any]) -> None:
    """In float64 from the projections, with the norms of the stream and of both latents at their actual scales."""
    terms = content_position_terms(shared_model("bridge", "deepseek_v3"), ZOO_TOKENS, 1)
    hf = zoo.hf_model("deepseek_v3").double()
    hf.set_experts_implementation("eager")
    layer = hf.model.layers[1]
    with torch.no_grad():
        x = hf.model(ZOO_TOKENS, output_hidden_states=True, use_cache=False).hidden_states[1]
        position = (x.mean(0) - x.mean((0, 1))).expand_as(x)
        parts = {"content": x - position, "position": position}
        of_queries = {name: _latent_vectors(layer, x, part)[0] for name, part in parts.items()}
        of_keys = {name: _latent_vectors(layer, x, part)[1] for name, part in parts.items()}
    at, theta = torch.arange(12).double(), 500.0 ** -(torch.arange(0, 8, 2).double() / 8)
    turned = torch.polar(torch.ones(()).double(), (at[:, None] - at)[..., None] * theta)
    for one, q in of_queries.items():
        for other, k in of_keys.items():
            planes = [torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous()) for x in (q, k)]
            rotated = torch.einsum("bqhc,bkhc,qkc->bhqk", planes[0], planes[1].conj(), turned).real
            expected = (rotated + torch.einsum("bqhd,bkhd->bhqk", q[..., 8:], k[..., 8:])) * 20**-0.5
            steps = 3 * 2  # each vector by way of a latent one and its norm
            found, expected = (x[..., terms.mask] for x in (terms.term(f"{one}:{other}"), expected))
            assert_close(found, expected, rounding(expected, steps))


def _latent_vectors(layer: Any, x: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of a part of the stream, the rotated slice first."""
    attn = layer.self_attn

    def frozen(norm: Any, whole: Tensor, some: Tensor) -> Tensor:
        return norm.weight * some / (whole.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()

    whole, some = (frozen(layer.input_layernorm, x, y) for y in (x, part))
    q = attn.q_b_proj(frozen(attn.q_a_layernorm, attn.q_a_proj(whole), attn.q_a_proj(some))).unflatten(-1, (8, 20))
    (latent, _), (of_part, shared) = (attn.kv_a_proj_with_mqa(y).split([16, 8], -1) for y in (whole, some))
    k = attn.kv_b_proj(frozen(attn.kv_a_layernorm, latent, of_part)).unflatten(-1, (8, 28))[..., :12]
    q = torch.cat([q[..., 12:], q[..., :12]], -1)
    return q, torch.cat([shared[:, :, None].expand(-1, -1, 8, -1), k], -1)


@torch.no_grad()
def _parts_by_hand(model: SyntheticModel, x: Tensor, norm: Any, w: Tensor, b: Tensor, grand_mean: str) -> list[Tensor]:
    mean = x.mean((0, 1))
    position = (x.mean(0) - mean).expand_as(x)
    content = x - position - (0 if grand_mean == "content" else mean)
    constant = torch.zeros_like(x) if grand_mean == "content" else mean.expand_as(x)
    scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def through(part: Tensor, bias: Any) -> Tensor:
        normed = (part - part.mean(-1, keepdim=True)) / scale * norm.w + (norm.b if bias else 0)
        return model.encoding.rotate(torch.einsum("bpm,hmd->bphd", normed, w) + (b if bias else 0))

    return [through(content, False), through(position, False), through(constant, True)]


def test_shares_by_hand() -> None:
    model = small_model(encoding="learned", causal=True)
    terms = content_position_terms(model, TOKENS, 1)
    table, scores = terms.to_frame().set_index(["head", "term"]), terms.scores()
    for name in ("content:content", "position:bias"):
        for head in range(3):
            x, w = (t[:, head][:, terms.mask].flatten() for t in (terms.term(name), scores))
            row = table.loc[(head, name)]
            assert row["share"] == pytest.approx(torch.cov(torch.stack([x, w]))[0, 1].item() / w.var().item(), abs=1e-9)
            assert row["size"] == pytest.approx((x.var() / w.var()).item(), abs=1e-9)
    with pytest.raises(ValueError, match=r"name must be 'content:content', .* got 'words'"):
        terms.term("words")
    of_term = terms.term("content:position")
    toeplitz = [by_distance(of_term[:, head], terms.mask) for head in range(3)]
    assert table.xs("content:position", level="term")["toeplitz"].tolist() == pytest.approx(toeplitz, abs=1e-9)


def by_distance(matrices: Tensor, mask: Tensor) -> float:
    """The share of the variance inside the mask that one function of the distance explains in all matrices."""
    places = torch.arange(mask.shape[-1])
    distance, x = (places[:, None] - places)[mask], matrices[..., mask].reshape(-1, int(mask.sum()))
    means = torch.stack([x[:, distance == d].mean() for d in distance.tolist()])
    return float(len(x) * (means - x.mean()).square().sum() / (x - x.mean()).square().sum())


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("olmo2", {}, "queries that are an affine function of the residual stream .*QK-norm"),
    ("gemma2", {}, "soft-caps its scores, so they are not sums of products"),
    ({"encoding": "mla"}, {}, "affine function .* a norm of latents"),
    ({"encoding": "rope", "rotary_heads": 1}, {}, "must add up to the scores, but in layer 1 .* rotates only some"),
    ({"pad_id": 0}, {"tokens": TOKENS[:1]}, "tokens must be at least two texts at every position for content_position"),
    ({"pad_id": 0}, {"tokens": TOKENS[:1].expand(4, -1)}, "at least two different texts, got 4 equal ones"),
    ({"pad_id": 0}, {"tokens": TOKENS * (torch.arange(9) < 7)}, "for padded texts pass attention_mask="),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("model", "changed", "message"), REFUSED)
def test_what_cannot_be_split(
    model: Any, changed: dict[str, Any], message: str, shared_model: Callable[[str, str], Any]
) -> None:
    built = (
        shared_model("bridge", model) if isinstance(model, str) else small_model(**({"encoding": "learned"} | model))
    )
    tokens = ZOO_TOKENS if isinstance(model, str) else TOKENS
    with pytest.raises(ValueError, match=message):
        content_position_terms(built, **({"tokens": tokens, "layer": 1} | changed))


def test_hooks_in_between_are_noticed() -> None:
    model, noise = small_model(encoding="alibi"), torch.randn(5, 3, 9, 9)
    for name, message in (
        ("hook_q", "hooks of your own"),
        ("hook_attn_scores", "must add up to the scores"),
    ):

        def change(x: Tensor, hook: Any) -> Tensor:
            return x + (noise if hook.name.endswith("scores") else noise[:, 0, :, :1, None])

        with model.hooks(fwd_hooks=[(f"blocks.1.attn.{name}", change)]), pytest.raises(ValueError, match=message):
            content_position_terms(model, TOKENS, 1)


# --- RoPE as a Hadamard product -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "llama-yarn", "gptj"))
def test_hadamard_products_add_up(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    model = shared_model(kind, name)
    form = rope_hadamard(model, ZOO_TOKENS, 1)
    n = len(form.rotary.frequencies)
    parts = [form.gram(c) * form.kernel(c) for c in range(n)]
    total = sum(part.real for part in parts) + form.rest()
    assert_close(total, form.scores(), 1e-10)
    assert_close(form.content(), sum(form.gram(c).real for c in range(n)) + form.rest(), 1e-10)
    if name != "gptj":  # the bridge shows its pattern there
        assert_close(total[..., form.mask], own_scores(model, ZOO_TOKENS, 1)[..., form.mask])
    whole = form.rest().abs().max() == 0
    assert whole == (form.rotary.dim == form.query.shape[-1])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_content_is_what_the_model_scores_at_distance_zero(
    kind: str, name: str, shared_model: Callable[[str, str], Any]
) -> None:
    model = shared_model(kind, name)
    form = rope_hadamard(model, ZOO_TOKENS, 0)
    with model.hooks(fwd_hooks=dummy_distance(model, 0, layers=[0])):
        plain = own_scores(model, ZOO_TOKENS, 0)
    assert_close(form.content()[..., form.mask], plain[..., form.mask])


def test_kernels_are_toeplitz_and_grams_know_no_position() -> None:
    model = small_model(encoding="rope")
    form, flipped = (rope_hadamard(model, tokens, 0) for tokens in (TOKENS, TOKENS.flip(1)))
    d = torch.arange(9)[:, None] - torch.arange(9)
    for c in range(4):
        assert_close(form.kernel(c).real, (form.rotary.frequencies[c] * d).cos(), 1e-6)
        assert_close(form.kernel(c).imag, (form.rotary.frequencies[c] * d).sin(), 1e-6)
        gram = flipped.gram(c).flip(-1, -2)
        torch.testing.assert_close(form.gram(c), gram, rtol=0, atol=rounding(gram.abs(), 3))
    with pytest.raises(ValueError, match="subspace must be an integer from 0 to 3, got 4"):
        form.gram(4)
    with pytest.raises(ValueError, match="rope_hadamard needs rotary position embeddings"):
        rope_hadamard(small_model(encoding="learned"), TOKENS, 0)


def test_shares_of_the_distance_are_those_of_the_matrices() -> None:
    form = rope_hadamard(small_model(encoding="rope"), TOKENS, 1)
    table = form.to_frame()
    for when, matrices in (("before", form.content()), ("after", form.scores())):
        shares = [by_distance(matrix, form.mask) for matrix in matrices.flatten(0, 1)]
        assert table[f"toeplitz_{when}"].tolist() == pytest.approx(shares, abs=1e-12)


# --- the positional subspace ----------------------------------------------------------------------------------------


def test_before_the_first_layer_it_is_that_of_the_position_vectors() -> None:
    model = small_model(encoding="learned")
    space = positional_subspace(model, latin(9), 0, rank=8)
    vectors = model.encoding.W_pos[:9].detach().double()
    vectors = vectors - vectors.mean(0)
    assert space.rank == 8
    assert subspace_angles(space.basis.numpy(), vectors.T.numpy()).max() < 1e-5
    assert_close(space.basis.T @ space.basis, torch.eye(8), 1e-12)
    assert_close(space.variances.sum(), vectors.square().sum(-1).mean(), 1e-5)
    along = (vectors @ space.basis).var(0, unbiased=False)
    assert_close(along, space.variances[:8], 1e-5)
    words = model.embed.W_E[1:10].detach().double()
    content = words.var(0, unbiased=False).sum()
    assert space.share == pytest.approx((space.variances.sum() / (space.variances.sum() + content)).item(), abs=1e-6)
    total = space.variances.cumsum(0) / space.variances.sum()
    rank = positional_subspace(model, latin(9), 0).rank
    assert total[rank - 1] >= 0.95 > (total[rank - 2] if rank > 1 else 0)


def test_noise_is_the_share_of_texts_without_positions() -> None:
    model, generator = small_model(encoding="none"), torch.Generator().manual_seed(0)
    found = [
        positional_subspace(model, torch.randint(1, 20, (6, 9), generator=generator), 0, rank=1) for _ in range(12)
    ]
    share, noise = (sum(getattr(space, name) for space in found) / 12 for name in ("share", "noise"))
    assert share == pytest.approx(noise, rel=0.1)
    assert noise > 0.1


def test_sinks_leave_the_first_positions_out() -> None:
    model = small_model(encoding="learned")
    space = positional_subspace(model, latin(9), 0, rank=4, sinks=4)
    vectors = model.encoding.W_pos[4:9].detach().double()
    assert space.rank == 4
    assert subspace_angles(space.basis.numpy(), (vectors - vectors.mean(0)).T.numpy()).max() < 1e-5
