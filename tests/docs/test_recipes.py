"""What the documentation says of a tool is so, on a model where it and its opposite differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import perturb
from tl_posdisent.hooks import applied, drop_component, substitute_additive
from tl_posdisent.models.loading.load import has_hooked

TOKENS = tp.demo_tokens(length=48)
HEAD = {"layers": [3], "heads": [0]}
MASK = torch.ones(48, 48).tril().bool()


@pytest.fixture
def model() -> Any:
    return tp.load_demo_model()


def seen(model: Any, hooks: Any = (), what: str = "pattern", tokens: Tensor = TOKENS) -> Tensor:
    """Of layer 3."""
    with torch.no_grad(), applied(model, hooks):
        return model.run_with_cache(tokens)[1][what, 3].double()


def logits(model: Any, hooks: Any = (), tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens)


def near(a: Tensor, b: Tensor, atol: float = 1e-4) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=atol)


def test_without_positions(model: Any) -> None:
    """The softmax of plain products of queries and keys; with the content dropped too, uniform attention."""
    (layer,) = tp.capture(model, TOKENS, layers=[3])
    products = layer.spec.scale * layer.q[0, :, 0].double() @ layer.k[0, :, 0].double().T
    content = products.masked_fill(~MASK, -torch.inf).softmax(-1)
    uniform = MASK / MASK.sum(1, keepdim=True)
    assert near(seen(model, tp.dummy_distance(model, 0, **HEAD))[0, 0], content)
    assert near(seen(model, tp.limit_frequencies(model, high=0, mode="freeze", **HEAD))[0, 0], content)
    assert near(seen(model, tp.limit_frequencies(model, high=0, mode="drop", **HEAD))[0, 0], uniform)
    for other in (uniform, seen(model)[0, 0]):
        assert not near(content, other, 0.1)


def test_bands_add_up(model: Any) -> None:
    cut = read_frequencies(model)[3]
    bands: list[dict[str, float]] = [{"low": cut}, {"high": 0.999 * cut}]
    halves = [seen(model, tp.limit_frequencies(model, **band, mode="drop", **HEAD), "attn_scores") for band in bands]
    whole = seen(model, (), "attn_scores")[0, 0][MASK]
    assert near(sum(x[0, 0][MASK] for x in halves), whole, 1e-3)
    assert not near(halves[0][0, 0][MASK], whole, 0.1)


def read_frequencies(model: Any) -> list[float]:
    return tp.read_model(model).specs(3)[0].rotary.frequencies.tolist()


def test_a_head_without_positions_can_matter(model: Any) -> None:
    """One whose queries are 0: ablation costs something, and other positions change nothing."""
    with torch.no_grad(), applied(model, tp.limit_frequencies(model, high=0, mode="drop", **HEAD)):
        blind = tp.head_ablation(model, TOKENS, **HEAD, progress=False)["effect"].item()
    assert abs(blind) > 1e-3
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    silence = tp.limit_frequencies(model, high=0, mode="drop", **HEAD)
    moved = logits(model, silence + tp.swap_positions(model, order, **HEAD))
    assert near(moved, logits(model, silence))
    assert not near(logits(model, tp.swap_positions(model, order, **HEAD)), logits(model), 0.01)


def test_the_softmax_cancels_the_query(model: Any) -> None:
    assert near(logits(model, drop_component(model, "query", **HEAD)), logits(model), 1e-3)
    assert not near(logits(model, drop_component(model, "distance", **HEAD)), logits(model), 0.05)


def test_a_component_that_fits_may_be_unused(model: Any) -> None:
    """Of a head whose output nothing reads, the distance explains as much, and dropping it changes nothing."""
    unread = tp.ablate_heads(model, ["L3H0"])
    shares = [
        tp.fit_additive(seen(model, hooks, "attn_scores")).to_frame()["share_distance"][0] for hooks in ((), unread)
    ]
    assert shares[0] == pytest.approx(shares[1])
    assert shares[0] > 0.05
    assert near(logits(model, unread + drop_component(model, "distance", **HEAD)), logits(model, unread))


def test_a_shift_changes_nothing(model: Any) -> None:
    places = torch.arange(48)
    assert near(logits(model, tp.swap_positions(model, places + 1000)), logits(model), 1e-2)
    assert not near(logits(model, tp.swap_positions(model, places * 2)), logits(model), 0.5)


def test_the_mask_still_tells_early_from_late(model: Any) -> None:
    tokens = torch.tensor([[0] + [300] * 9])
    alike = logits(model, tp.dummy_distance(model, 0), tokens)[0]
    assert not near(alike[1], alike[9], 0.1)
    assert near(logits(model, tp.dummy_distance(model, 0), tokens[:, 1:])[0].std(0), torch.zeros(()), 1e-3)


def test_hooks_that_never_fire(model: Any) -> None:
    def stopped() -> None:
        model(TOKENS, stop_at_layer=2)

    hooks = tp.dummy_distance(model, 5, layers=[3])
    with model.hooks(fwd_hooks=hooks):
        stopped()
    with pytest.raises(RuntimeError, match="never fired"), applied(model, hooks):
        stopped()


def test_a_bridge_ignores_fwd_hooks_of_other_calls() -> None:
    """Without an error, unlike ``run_with_hooks`` and calls inside ``hooks`` and ``applied``."""
    bridge = tp.load_demo_model(backend="bridge")
    hooks = tp.dummy_distance(bridge, 5)
    few = {"max_new_tokens": 8, "do_sample": False, "verbose": False, "use_past_kv_cache": False}
    with torch.no_grad():
        plain, generated = bridge(TOKENS), bridge.generate(TOKENS, **few)
        ignored = bridge(TOKENS, fwd_hooks=hooks), bridge.run_with_cache(TOKENS, fwd_hooks=hooks)[0]
        assert torch.equal(bridge.generate(TOKENS, fwd_hooks=hooks, **few), generated)
        effective = [bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)]
        for block in (bridge.hooks(fwd_hooks=hooks), applied(bridge, hooks)):
            with block:
                effective += [bridge(TOKENS), bridge.run_with_cache(TOKENS)[0]]
                assert not torch.equal(bridge.generate(TOKENS, **few), generated)
    assert all(near(x, plain) for x in ignored)
    assert all(near(x, effective[0]) and not near(x, plain, 1.0) for x in effective)


@pytest.mark.skipif(not has_hooked(), reason="the installed TransformerLens has no HookedTransformer")
def test_a_hooked_transformer_refuses_fwd_hooks_of_other_calls() -> None:
    hooked = tp.load_demo_model(backend="hooked")
    hooks = tp.dummy_distance(hooked, 5)
    for call in (hooked, hooked.run_with_cache):
        with pytest.raises(TypeError, match="unexpected keyword argument 'fwd_hooks'"):
            call(TOKENS, fwd_hooks=hooks)


def test_a_knocked_out_key_is_as_if_it_were_not_there(model: Any) -> None:
    """The others share its attention, and no later token depends on it; positions stay."""
    hooks = tp.knock_out(model, range(11, 48), 10, layers=[3])
    pattern, plain = seen(model, hooks)[0, :, 11:], seen(model)[0, :, 11:]
    rest = plain.clone()
    rest[..., 10] = 0
    assert near(pattern, rest / rest.sum(-1, keepdim=True))
    other = TOKENS.clone()
    other[0, 10] = 7
    everywhere = tp.knock_out(model, range(11, 48), 10)
    after = [logits(model, everywhere, tokens)[0, 11:] for tokens in (TOKENS, other)]
    assert near(*after)
    assert not near(logits(model, (), other)[0, 11:], logits(model)[0, 11:], 0.1)


def test_no_head_sees_beyond_the_window(model: Any) -> None:
    hooks = tp.lambda_mask(model, 2, 6, 6)
    hidden = ~torch.ones(48, 48).triu(-5).bool()
    hidden[:, :2] = False
    assert float(seen(model, hooks)[0][:, hidden].abs().max()) == 0
    assert float(seen(model)[0][:, hidden].max()) > 0.1
    other = TOKENS.clone()
    other[0, 30] = 7
    last = [logits(model, hooks, tokens)[0, -1] for tokens in (TOKENS, other)]  # 17 positions behind it
    assert not near(*last, 1e-3)
    other = TOKENS.clone()
    other[0, 10] = 7  # beyond five layers of five positions
    assert near(last[0], logits(model, hooks, other)[0, -1])


def test_the_mean_score_is_uniform_attention(model: Any) -> None:
    pattern = seen(model, substitute_additive(model, [], layers=[3]))[0]
    assert near(pattern, (MASK / MASK.sum(1, keepdim=True)).expand(8, -1, -1))


def test_all_kinds_move_the_same_positions(model: Any) -> None:
    runs = {kind: perturb(model, TOKENS, kind, 0.5, seed=3) for kind in ("order", "index", "feature")}
    moved = {kind: run.moved.tolist() for kind, run in runs.items()}
    assert moved["order"] == moved["index"] == moved["feature"]
    assert perturb(model, TOKENS, "order", 0.5, seed=4).moved.tolist() != moved["order"]


def test_a_mean_over_positions_ablates_what_depends_on_them(model: Any) -> None:
    same = torch.full((1, 48), 300)
    same[0, 0] = 0
    z = seen(model, (), "z", same)[0, :, 0]
    mean = seen(model, tp.ablate_heads(model, ["L3H0"], mode="mean", reference=same), "z", same)[0, :, 0]
    assert not near(z[1], z[-1], 1e-2)
    assert near(mean, z.mean(0).expand_as(mean), 1e-3)
