"""Lies about position: as Hugging Face with other position_ids, as brute force with other distances, and no other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import applied, capture, dummy_distance, read_layers, remap_distance, swap_positions
from tl_posdisent.lens.run import Hook

L = 12
TOKENS = zoo.random_tokens(L)
REAL = torch.arange(L)
ROTARY = [case for case in zoo.cases(*zoo.ROTARY_NAMES) if case.values[1] != "deepseek_v3"]
# One of each way: tables exchanged, rotated vectors turned, unrotated ones turned, scores or z recomputed; with groups,
# norms between, windows, soft caps, sinks.
WAYS = [
    *zoo.cases("llama-gqa", "gptj", "gemma2"),
    *(("bridge", name) for name in ("neox", "codegen", "falcon", "olmo2-gqa", "gpt_oss")),
    ("hooked", "qwen3"),
]


def every_way(test: Any) -> Any:
    """Without the checks of annotations, which take longer than the models; other tests have them."""
    return pytest.mark.usefixtures("unchecked")(pytest.mark.parametrize(("kind", "name"), WAYS)(test))


FEW = zoo.cases("llama-gqa", "gptj", "gemma2")

UNORDERED = torch.tensor([[5, 0, 3, 3, 90, 11, 64, 2, 7, 30, 1, 8], [0, 9, 2, 41, 4, 77, 6, 5, 88, 13, 21, 3]])
FAR = torch.tensor([[0, 50_000, 3, 17, 49_999, 20_000, 1, 2, 33_333, 7, 5, 100]]).expand(2, L)
BROKEN = torch.tensor([0.5, 3.25, -1.75, 2.0, 11.5, 0.1, 9.9, 4.2, 6.6, -8.0, 30.3, 1.0])


def logits(model: Any, hooks: list[Hook], tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens)


def distances(positions: Tensor) -> Tensor:
    return positions.double()[..., :, None] - positions.double()[..., None, :]


def close(got: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def mixed_of(model: Any, hooks: list[Hook], layer: int = 0) -> Tensor:
    """What every head takes along, ``[batch, head, pos, d_head]``: all that others see of its scores."""
    name = f"blocks.{layer}.attn.hook_z"
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model.run_with_cache(TOKENS, names_filter=name)[1][name].transpose(1, 2)


def by_brute_force(model: Any, wanted: Tensor, layer: int = 0) -> Tensor:
    """The same at any distances ``[query, key]`` or ``[batch, head, query, key]``: by complex numbers in float64, from
    queries, keys and values of the model."""
    captured = next(x for x in capture(model, TOKENS, layers=[layer]))
    spec, rotary = captured.spec, captured.spec.rotary
    name = f"blocks.{layer}.attn.hook_v"
    with torch.no_grad():
        values = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
    q, k = captured.q.double(), captured.k.double()
    k, values = (x.repeat_interleave(spec.n_heads // x.shape[2], 2) for x in (k, values))
    n = len(rotary.frequencies)
    halves = (slice(0, n), slice(n, 2 * n)) if rotary.pairing == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    zq, zk = (torch.complex(x[..., halves[0]], x[..., halves[1]]) for x in (q, k))
    turn = torch.exp(1j * wanted.expand(2, spec.n_heads, L, L)[..., None] * rotary.frequencies)
    scores = torch.einsum("bqhc,bkhc,bhqkc->bhqk", zq, zk.conj(), turn).real * rotary.attention_factor**2
    scores = scores + torch.einsum("bqhd,bkhd->bhqk", q[..., 2 * n :], k[..., 2 * n :])
    scores = scores * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    scores = scores.masked_fill(~spec.mask(L), -torch.inf)
    sinks = getattr(getattr(model.blocks[layer].attn, "original_component", model.blocks[layer].attn), "sinks", None)
    if sinks is not None:
        scores = torch.cat([scores, sinks.detach().double()[:, None, None].expand(2, spec.n_heads, L, 1)], -1)
    return torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1)[..., :L], values).float()


# --- positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), ROTARY)
def test_positions_are_the_position_ids_of_hugging_face(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, expected = logits(model, []), zoo.hf_logits(name, TOKENS, position_ids=UNORDERED)
    scale = plain.abs().max().item()
    assert (expected - plain).abs().max() > 0.1 * scale
    assert torch.equal(logits(model, swap_positions(model, REAL)), plain)
    close(logits(model, swap_positions(model, REAL + 37)), plain, 1e-5 * scale)
    close(logits(model, swap_positions(model, UNORDERED)), expected, 1e-5 * scale)
    close(logits(model, remap_distance(model, distances(UNORDERED)[:, None])), expected, 1e-5 * scale)


@every_way
def test_far_positions(kind: str, name: str, shared_model: Any) -> None:
    """A float32 angle at position 50 000 is off by 0.002, and Hugging Face's is off in the same way.

    Where a HookedTransformer computes its own tables the frequencies differ in the last bit from Hugging Face's."""
    model = shared_model(kind, name)
    reach = FAR % 128 if name in ("gptj", "codegen") else FAR  # which keep a table for their context
    expected = zoo.hf_logits(name, TOKENS, position_ids=reach)
    assert (expected - logits(model, [])).abs().max() > 0.5
    got = logits(model, swap_positions(model, reach))
    close(got, expected, 1e-4 if kind == "bridge" else 3e-2)
    if read_layers(model, [0])[0].cos and name != "falcon":  # which in any case sums in another order
        assert torch.equal(got, expected)
    plain = logits(model, [])
    close(logits(model, swap_positions(model, REAL + 100_000)), plain, 0.2)


@every_way
def test_positions_between_and_before_the_whole_numbers(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    got = mixed_of(model, swap_positions(model, BROKEN))
    close(got, by_brute_force(model, distances(BROKEN)), 2e-5)
    per_text = torch.stack([BROKEN, BROKEN.flip(0)])
    close(
        mixed_of(model, swap_positions(model, per_text))[1], by_brute_force(model, distances(BROKEN.flip(0)))[1], 2e-5
    )
    close(logits(model, swap_positions(model, [0.5 + i for i in range(L)])), logits(model, []))


@every_way
def test_texts_have_positions_of_their_own(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    both = logits(model, swap_positions(model, UNORDERED))
    for row in range(2):
        alone = logits(model, swap_positions(model, UNORDERED[row]), TOKENS[row : row + 1])
        close(both[row], alone[0])
        close(logits(model, swap_positions(model, UNORDERED[row : row + 1]))[row], alone[0])


# --- distances ------------------------------------------------------------------------------------------------

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "halved": lambda d: 3 - d / 2,
    "constant": lambda d: torch.full_like(d, 5.0),
    "at most 3": lambda d: d.clamp(max=3),
    "backwards": lambda d: 11 - d**2 / 7,
}


@pytest.mark.parametrize("name_of_map", MAPS)
@every_way
def test_any_function_of_the_distance(kind: str, name: str, name_of_map: str, shared_model: Any) -> None:
    model, function = shared_model(kind, name), MAPS[name_of_map]
    hooks = remap_distance(model, function)
    matrix = function((REAL[:, None] - REAL).clamp(min=0).double())
    expected = by_brute_force(model, matrix)
    assert (expected - mixed_of(model, [])).abs().max() > 0.1
    close(mixed_of(model, hooks), expected, 2e-5)
    close(mixed_of(model, remap_distance(model, matrix)), expected, 2e-5)
    close(mixed_of(model, remap_distance(model, matrix[None])), expected, 2e-5)  # never by rotation
    by_rotation = "turn" in {act.__name__ for _, act in hooks}
    assert by_rotation == (name_of_map in ("halved", "constant"))
    if name_of_map == "constant":
        assert torch.equal(logits(model, dummy_distance(model, 5)), logits(model, hooks))


@every_way
def test_one_dummy_distance_for_all(kind: str, name: str, shared_model: Any) -> None:
    """Also in later layers, which see what the earlier ones have made of it; and at distance 0 without any turn."""
    model = shared_model(kind, name)
    for d in (0, -2.5, 40):
        close(mixed_of(model, dummy_distance(model, d)), by_brute_force(model, torch.tensor(float(d))), 2e-5)
    everywhere = torch.full((L, L), 7.0)
    close(logits(model, dummy_distance(model, 7)), logits(model, remap_distance(model, everywhere[None, None])))


@every_way
def test_any_matrix_of_distances(kind: str, name: str, shared_model: Any) -> None:
    """For all heads, per head, per text; cells outside the mask may hold anything."""
    model = shared_model(kind, name)
    spec = read_layers(model, [0])[0]
    for shape in ((L, L), (8, L, L), (2, 1, L, L), (2, 8, L, L)):
        matrix = (50_000 if shape[0] == 8 else 20) * torch.randn(shape, dtype=torch.float64)
        expected = by_brute_force(model, matrix)
        matrix[..., ~spec.mask(L)] = torch.nan
        got = mixed_of(model, remap_distance(model, matrix, layers=[0]))
        close(got, expected, 2e-5)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])  # others cannot run beyond their context
def test_a_function_that_bends_beyond_the_context_is_refused_there(name: str, shared_model: Any) -> None:
    """It looks straight as far as the model's context goes (128 tokens), and the text is longer."""
    model, tokens = shared_model("bridge", name), zoo.random_tokens(140)
    hooks = remap_distance(model, lambda d: d.clamp(max=130))
    close(logits(model, hooks), logits(model, []))
    with pytest.raises(ValueError, match="is not that line over this text of 140: give a matrix"):
        logits(model, hooks, tokens)
    real = torch.arange(140)
    as_matrix = remap_distance(model, (real[:, None] - real + 5.0)[None, None])
    close(logits(model, remap_distance(model, lambda d: d + 5), tokens), logits(model, as_matrix, tokens))


# --- some heads, some layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["swap", "remap"])
@every_way
def test_only_the_chosen_heads_are_lied_to(kind: str, name: str, lie: str, shared_model: Any) -> None:
    """The others are the same to the last bit, also those that share their keys."""
    model = shared_model(kind, name)
    tool: Callable[..., list[Hook]] = {
        "swap": lambda **more: swap_positions(model, UNORDERED, **more),
        "remap": lambda **more: remap_distance(model, lambda d: d.clamp(max=2), **more),
    }[lie]
    wanted = {
        "swap": distances(UNORDERED)[:, None],
        "remap": (REAL[:, None] - REAL).clamp(max=2).double(),
    }[lie]
    plain, everything = mixed_of(model, []), by_brute_force(model, wanted)
    for heads in ([0], [1, 6], [4, 5, 6, 7]):
        others = [h for h in range(8) if h not in heads]
        got = mixed_of(model, tool(heads=heads, layers=[0]))
        assert torch.equal(got[:, others], plain[:, others])
        close(got[:, heads], everything[:, heads], 2e-5)
        assert (got[:, heads] - plain[:, heads]).abs().amax((0, 2, 3)).min() > 1e-3


@every_way
def test_heads_one_after_the_other_are_all_heads(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for one_by_one in ([[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]):
        hooks = [hook for heads in one_by_one for hook in swap_positions(model, UNORDERED, heads=heads)]
        close(logits(model, hooks), zoo.hf_logits(name, TOKENS, position_ids=UNORDERED))


@every_way
def test_only_the_chosen_layers_are_lied_to(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for hooks in (
        swap_positions(model, UNORDERED, layers=[1]),
        dummy_distance(model, 4, layers=[1], heads=[3]),
        remap_distance(model, lambda d: d.sqrt(), layers=[1]),
    ):
        assert torch.equal(mixed_of(model, hooks, layer=0), mixed_of(model, [], layer=0))
        assert not torch.equal(mixed_of(model, hooks, layer=1), mixed_of(model, [], layer=1))
    separately = [hook for layer in (1, 0) for hook in swap_positions(model, UNORDERED, layers=[layer])]
    close(logits(model, separately), logits(model, swap_positions(model, UNORDERED, layers=[0, 1])))


# --- plain lists of hooks -------------------------------------------------------------------------------------

LIES: dict[str, Callable[[Any], list[Hook]]] = {
    "swap": lambda model: swap_positions(model, UNORDERED),
    "swap some": lambda model: swap_positions(model, UNORDERED, heads=[1, 6]),
    "dummy": lambda model: dummy_distance(model, 5),
    "remap": lambda model: remap_distance(model, lambda d: d.clamp(max=2)),
}
EVERY_LIE = pytest.mark.parametrize("lie", LIES.values(), ids=LIES)


@EVERY_LIE
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_every_way_to_apply_hooks(kind: str, name: str, lie: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = lie(model)
    assert type(hooks) is list
    assert all(type(hook) is tuple and isinstance(hook[0], str) and callable(hook[1]) for hook in hooks)
    plain, expected = logits(model, []), logits(model, hooks)
    assert (expected - plain).abs().max() > 0.1
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=hooks), expected)
        with model.hooks(fwd_hooks=hooks):
            assert torch.equal(model(TOKENS), expected)
            assert torch.equal(model.run_with_cache(TOKENS)[0], expected)
            assert torch.equal(model(TOKENS), expected)  # hooks can be used again
    assert torch.equal(logits(model, hooks[::1]), expected)
    assert torch.equal(logits(model, []), plain)


@EVERY_LIE
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_nothing_is_held_after_the_run(kind: str, name: str, lie: Any, shared_model: Any) -> None:
    model, seen = shared_model(kind, name), []

    def watch(x: Tensor, hook: Any) -> None:
        seen.append(weakref.ref(x))

    hooks = lie(model)
    names = {hook for hook, _ in hooks} | {f"blocks.0.attn.{x}" for x in ("hook_q", "hook_k", "hook_v", "hook_pattern")}
    logits(model, [*hooks, *((hook, watch) for hook in names)])
    assert len(seen) >= len(names)
    assert [ref for ref in seen if ref() is not None] == []


@EVERY_LIE
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_gradients_flow(kind: str, name: str, lie: Any) -> None:
    """The gradient through the hooks is that of finite differences."""
    model = zoo.load(kind, name)
    parameter = next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB)  # the embedding
    with applied(model, lie(model)):
        loss = model(TOKENS).double().pow(2).mean()
        (gradient,) = torch.autograd.grad(loss, parameter)
        assert gradient.abs().max() > 0
        step = 1e-3 * gradient / gradient.norm()
        with torch.no_grad():
            parameter.add_(step)
            up = model(TOKENS).double().pow(2).mean()
            parameter.sub_(2 * step)
            down = model(TOKENS).double().pow(2).mean()
    slope = (up - down) / (2 * step.norm())
    torch.testing.assert_close(slope, gradient.norm().double(), rtol=2e-2, atol=0)


# --- refusals at run time -------------------------------------------------------------------------------------


def refused(model: Any, hooks: list[Hook], message: str, **arguments: Any) -> None:
    """The run fails with this message, and the model is as before."""
    plain = logits(model, [])
    tokens = arguments.pop("tokens", TOKENS)
    with torch.no_grad(), pytest.raises(ValueError, match=message), model.hooks(fwd_hooks=hooks):
        model(tokens, **arguments)
    assert torch.equal(logits(model, []), plain)


@every_way
def test_a_text_of_another_length_is_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    ten = zoo.random_tokens(10)
    for heads in (None, [1], list(range(4))):
        hooks = swap_positions(model, UNORDERED, heads=heads)
        refused(model, hooks, "positions were given for 12 tokens, and the model runs on 10", tokens=ten)
    straight = remap_distance(model, distances(BROKEN))
    refused(model, straight, "distances were given for 12 tokens, and the model runs on 10", tokens=ten)
    bent = remap_distance(model, distances(BROKEN) ** 2)
    refused(model, bent, r"distances must have shape \(query, key\) = \(10, 10\).* got \(12, 12\)", tokens=ten)


@every_way
def test_another_number_of_texts_is_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for heads in (None, [1]):
        for texts in (1, 3):
            tokens = zoo.random_tokens(batch=texts)
            hooks = swap_positions(model, UNORDERED, heads=heads)
            refused(model, hooks, f"positions were given for 2 texts, and the model runs on {texts}", tokens=tokens)
    matrix = torch.randn(2, 1, L, L)
    refused(
        model, remap_distance(model, matrix), r"distances must have shape .* 3 texts", tokens=zoo.random_tokens(batch=3)
    )
    refused(
        model, remap_distance(model, torch.randn(3, L, L)), r"distances must have shape .* 8 heads .*got \(3, 12, 12\)"
    )
    hole = torch.zeros(8, L, L)
    hole[3, 5, 5] = torch.inf
    refused(model, remap_distance(model, hole), "distances must be finite inside the mask")


@EVERY_LIE
@every_way
def test_a_key_value_cache_is_refused(kind: str, name: str, lie: Any, shared_model: Any) -> None:
    """The new token's query stands at position 0 for the hooks, and at 12 for the model."""
    model = shared_model(kind, name)
    after = TOKENS[:, :1]
    message = (
        r"queries against \d+ keys|12 tokens, and the model runs on 1|not that line|is not that of positions 0, 1, 2"
    )
    if kind == "bridge":
        with torch.no_grad():
            _, cache = model(TOKENS, return_type="logits_and_cache", use_cache=True)
        refused(model, lie(model), message, tokens=after, past_key_values=cache, use_cache=True)
    else:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
        with torch.no_grad():
            model(TOKENS, past_kv_cache=cache, attention_mask=torch.ones_like(TOKENS))
        refused(model, lie(model), message, tokens=after, past_kv_cache=cache, attention_mask=torch.ones_like(after))


@every_way
def test_generating_without_a_cache_works(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    prompt = TOKENS[:1, :4]
    with torch.no_grad(), model.hooks(fwd_hooks=dummy_distance(model, 3)):
        text = prompt
        for _ in range(3):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        if kind == "hooked":
            options = {"do_sample": False, "use_past_kv_cache": False, "verbose": False, "stop_at_eos": False}
            assert torch.equal(model.generate(prompt, max_new_tokens=3, **options), text)
    with torch.no_grad(), model.hooks(fwd_hooks=dummy_distance(model, 3)):
        if kind == "hooked":
            with pytest.raises(ValueError, match="queries against 5 keys"):
                model.generate(prompt, max_new_tokens=3, do_sample=False, verbose=False, stop_at_eos=False)


@every_way
def test_padding_on_the_left_is_right_or_refused(kind: str, name: str, shared_model: Any) -> None:
    """The model then counts from the first real token: turning from 0, 1, 2 … would be off."""
    model = shared_model(kind, name)
    mask = torch.ones(2, L, dtype=torch.int64)
    mask[0, :4] = 0
    with torch.no_grad():
        model(TOKENS, attention_mask=mask)
    lies = {
        "swap": lambda kept: swap_positions(model, BROKEN[-kept:]),
        "dummy": lambda kept: dummy_distance(model, 4),
        "remap": lambda kept: remap_distance(model, lambda d: d.clamp(max=2)),
    }
    right = []
    for lie, tool in lies.items():
        try:
            with torch.no_grad(), applied(model, tool(L)):
                got = model(TOKENS, attention_mask=mask)
        except ValueError as error:
            assert "padding" in str(error) or "padded texts are not supported" in str(error)  # noqa: PT017 - or right
            continue
        close(got[0, 4:], logits(model, tool(L - 4), TOKENS[:1, 4:])[0])
        close(got[1], logits(model, tool(L))[1])
        right.append(lie)
    # Tables are exchanged and scores recomputed whatever the model's own positions are.
    exchanged = ["swap"] if read_layers(model, [0])[0].cos else []
    assert right == ([*exchanged, "remap"] if name != "gptj" or kind == "hooked" else [])


@pytest.mark.parametrize("name", ["llama-gqa", "neox", "falcon", "qwen3"])
def test_position_ids_of_the_users_own_are_refused(name: str, shared_model: Any) -> None:
    model = shared_model("bridge", name)
    own = {"position_ids": UNORDERED, "attention_mask": torch.ones(2, L, dtype=torch.int64)}
    refused(model, dummy_distance(model, 3), "rotation table of layer 0 is not that of positions 0, 1, 2", **own)
    twice = swap_positions(model, UNORDERED) + dummy_distance(model, 3)
    refused(model, twice, "rotation table of layer 0 .* lie to each head once")


# --- refusals at once -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: swap_positions(m, torch.zeros(2, 2, 12)),
            r"positions must have shape \(pos,\) or .* got \(2, 2, 12\)",
        ),
        (lambda m: swap_positions(m, torch.tensor(3)), r"positions must have shape .* got \(\)"),
        (lambda m: swap_positions(m, []), r"positions must have shape .* got \(0,\)"),
        (lambda m: swap_positions(m, [0, 1, float("nan")]), "positions must be finite real numbers, got .*nan"),
        (lambda m: swap_positions(m, [0, float("inf")]), "positions must be finite real numbers, got .*inf"),
        (lambda m: swap_positions(m, REAL * 1j), "positions must be finite real numbers, got"),
        (lambda m: swap_positions(m, REAL > 3), "positions must be finite real numbers, got"),
        (lambda m: swap_positions(m, "0123"), "positions must be real numbers, got '0123'"),
        (lambda m: swap_positions(m, None), "positions must be real numbers, got None"),
        (lambda m: dummy_distance(m, float("nan")), "distance must be a finite number, got nan"),
        (lambda m: dummy_distance(m, float("inf")), "distance must be a finite number, got inf"),
        (lambda m: dummy_distance(m, True), "distance must be a finite number, got True"),
        (lambda m: dummy_distance(m, "3"), "distance must be a finite number, got '3'"),
        (lambda m: dummy_distance(m, REAL), "distance must be a finite number, got tensor"),
        (lambda m: remap_distance(m, 3), "distances must be a function or a tensor, got int"),
        (lambda m: remap_distance(m, None), "distances must be a function or a tensor, got NoneType"),
        (lambda m: remap_distance(m, torch.zeros(12)), r"distances must have shape \(query, key\), .*got \(12,\)"),
        (lambda m: remap_distance(m, torch.zeros(0, 0)), r"distances must have shape .* got \(0, 0\)"),
        (lambda m: remap_distance(m, torch.zeros(1, 1, 1, 12, 12)), r"distances must have shape .*\(1, 1, 1, 12, 12\)"),
        (lambda m: remap_distance(m, torch.zeros(12, 12) * 1j), "distances must be finite real numbers, got"),
        (lambda m: remap_distance(m, lambda d: 5), r"same shape \(.*\), got int"),
        (lambda m: remap_distance(m, lambda d: d[:-1]), r"same shape \(.*\), got shape \(\d+,\)"),
        (lambda m: remap_distance(m, lambda d: 1 / d), "got values that are not finite"),
        (lambda m: remap_distance(m, torch.log), "got values that are not finite"),
    ],
)
def test_what_is_no_position_and_no_distance(call: Any, message: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match=message):
        call(model)
