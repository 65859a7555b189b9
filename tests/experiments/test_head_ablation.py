"""Every head ablated alone: the numbers of the plain loop, less work, and a model that is as before."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from tl_posdisent import ablate_heads, head_ablation, head_effects
from tl_posdisent.experiments.measuring import runs
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel

TOKENS = zoo.random_tokens(length=9, batch=3)
LOSS = log(61)  # of models with random weights and this vocabulary
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "bloom"))


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """One number for each text."""
    flat = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1).mean(1)


def mass(output: Tensor, tokens: Tensor) -> Tensor:
    """For any output."""
    return output.flatten(1).double().square().mean(1)


def loop(model: Any, metric: Any = loss, tokens: Tensor = TOKENS, mode: str = "zero", n_heads: int = 8) -> Tensor:
    """The plain way."""
    values = []
    for layer in range(model.cfg.n_layers):
        for head in range(n_heads):
            reference = tokens if mode == "mean" else None
            hooks = ablate_heads(model, [(layer, head)], mode=mode, reference=reference, seed=4)
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                values.append(float(metric(model(tokens), tokens).double().mean()))
    return torch.tensor(values, dtype=torch.float64)


def agree(table: pd.DataFrame, values: Tensor) -> None:
    """Both are means of a metric of float32 logits."""
    atol = rounding(values, 2)
    torch.testing.assert_close(torch.tensor(table["value"].to_numpy()), values, rtol=0, atol=atol)
    assert values.std() > 10 * atol  # there is something to agree about


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "bloom", "gemma2", "gpt_oss"))
@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
@pytest.mark.usefixtures("unchecked")
def test_the_numbers_of_the_plain_loop(kind: str, name: str, mode: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = head_ablation(model, TOKENS, mode=mode, seed=4, progress=False)
    n = model.cfg.n_layers
    assert table["layer"].tolist() == [layer for layer in range(n) for _ in range(8)]
    assert table["head"].tolist() == list(range(8)) * n
    agree(table, loop(model, mode=mode))
    with torch.no_grad():
        baseline = float(loss(model(TOKENS), TOKENS).mean())
    assert table["baseline"].tolist() == pytest.approx([baseline] * len(table), abs=rounding(baseline))
    assert (table["effect"] == table["value"] - table["baseline"]).all()


@FEW
def test_a_choice_of_heads_and_layers_in_batches_of_any_size(
    kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(kind, name)
    whole = head_ablation(model, TOKENS, progress=False).set_index(["layer", "head"])["value"]
    for size, most in ((1, 9), (2**27, 8), (2**27, 9)):  # of one head, two, and all
        monkeypatch.setattr(runs, "_BYTES_PER_PASS", size)
        monkeypatch.setattr(runs, "_MAX_TEXTS_PER_PASS", most)
        some = head_ablation(model, TOKENS, layers=[1, 0], heads=[6, 1, 3], progress=False)
        assert list(zip(some["layer"], some["head"], strict=True)) == [(x, h) for x in (0, 1) for h in (1, 3, 6)]
        expected = whole.loc[list(zip(some["layer"], some["head"], strict=True))]
        assert some["value"].tolist() == pytest.approx(expected.tolist(), abs=rounding(LOSS, 2))


# --- less work ------------------------------------------------------------------------------------------------


def texts_through(model: Any, parts: dict[str, nn.Module], call: Callable[[], Any]) -> dict[str, list[int]]:
    """How many texts of our length go through parts of a model in each call."""
    counts: dict[str, list[int]] = {name: [] for name in parts}

    def counter(name: str) -> Any:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 2)
            if x.shape[1] == TOKENS.shape[1]:  # not those of the probe
                counts[name].append(len(x))

        return count

    handles = [part.register_forward_pre_hook(counter(name), with_kwargs=True) for name, part in parts.items()]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return counts


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_what_is_known_is_not_computed_again(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    parts = {f"mlp {i}": model.blocks[i].mlp for i in (0, 1)}
    parts |= {f"attn {i}": model.hook_dict[f"blocks.{i}.attn.hook_q"] for i in (0, 1)}
    # The clean run; z of each head; eight heads and an unmodified text; and one head by a full pass.
    last = texts_through(model, parts, lambda: head_ablation(model, TOKENS, layers=[1], progress=False))
    assert last == {"attn 0": [3, 3], "mlp 0": [3, 3], "attn 1": [3, *[3] * 8, 25, 3], "mlp 1": [3, 25, 3]}
    first = texts_through(model, parts, lambda: head_ablation(model, TOKENS, layers=[0], progress=False))
    assert first == {"attn 0": [3, *[3] * 8, 25, 3], "mlp 0": [3, 25, 3], "attn 1": [3, 25, 3], "mlp 1": [3, 25, 3]}


def test_what_is_known_is_not_computed_again_in_deeper_models() -> None:
    model = zoo.bridge("llama-gqa", num_hidden_layers=4)
    parts = {str(i): model.blocks[i].mlp for i in range(4)}
    # The clean run; in the last block alone, eight heads and an unmodified text; and one head by a full pass.
    last = texts_through(model, parts, lambda: head_ablation(model, TOKENS, layers=[3], progress=False))
    assert last == {"0": [3, 3], "1": [3, 3], "2": [3, 3], "3": [3, 25, 3]}
    # Of two layers, one is compared. Before, a text, another one, and each block alone show that blocks are separate.
    both = texts_through(model, parts, lambda: head_ablation(model, TOKENS, layers=[2, 3], progress=False))
    separate = [1, 1, 1]
    assert both["0"] == both["1"] == [3, *separate, 3]
    assert (both["2"], both["3"]) == ([3, *separate, 25, 3], [3, *separate, 25, 3, 25])


@FEW
def test_hooks_of_the_user_stay_in_force(kind: str, name: str) -> None:
    """Also those that no shortcut could bear, since they mix the texts of a batch."""
    model = zoo.load(kind, name)
    plain = loop(model)

    def third_text_halved(x: Tensor, hook: Any) -> Tensor:
        return torch.cat([x[:2], 0.5 * x[2:3], x[3:]])

    def of_large_batches(x: Tensor, hook: Any) -> Tensor:
        return torch.cat([x[:12], 1.01 * x[12:13], x[13:]])

    point = model.hook_dict["blocks.0.hook_resid_post"]
    for hook in (lambda x, hook: 0.7 * x + 0.3 * x.flip(0), third_text_halved, of_large_batches):
        point.add_hook(hook)
        table = head_ablation(model, TOKENS, progress=False)
        agree(table, loop(model))
        assert ((torch.tensor(table["value"].to_numpy()) - plain).abs().max() > 1e-3) == (hook is not of_large_batches)
        model.reset_hooks()


SHARING: dict[str, type[Exception]] = {"keys": KeyError, "attributes": AttributeError, "asserted": AssertionError}


class Attention(nn.Module):
    def __init__(self, deaf: bool) -> None:
        super().__init__()
        self.hook_z, self.deaf = HookPoint(), deaf
        self.mix = nn.Parameter(torch.randn(4, 3, 12))

    def forward(self, x: Tensor) -> Tensor:
        z = x.cumsum(1).tanh().unflatten(-1, (4, 3))
        heard = self.hook_z(z)
        return torch.einsum("bphd,hdm->bpm", z if self.deaf else heard, self.mix)


class Block(nn.Module):
    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.attn, self.owner = Attention(owner.trait == "deaf"), [owner]

    def forward(self, x: Tensor) -> Tensor:
        (owner,) = self.owner
        if owner.trait == "full" and len(x) > 5:
            raise torch.OutOfMemoryError
        y = self.attn(x)
        if owner.trait == "proud":
            y = y - y.mean(0)  # the texts of a batch see each other
        if owner.trait == "secretive":
            y, owner.secret = y + owner.secret, y  # what a block hands on past the stream
        if owner.trait in SHARING:  # keys of an earlier block, as Gemma 4 has them
            if self is owner.blocks[1] and owner.secret == 0.0:
                raise SHARING[owner.trait]("shared_kv_states")
            owner.secret = 1.0
        if owner.trait == "noisy":
            y = nn.functional.dropout(y, 0.5, self.training)
        return x + y.tanh()


class Micro(HookedRootModule):
    """Two blocks with the names of TransformerLens, four heads, three classes, and a trait."""

    def __init__(self, trait: str) -> None:
        super().__init__()
        self.trait, self.secret = trait, 0.0
        self.cfg = SimpleNamespace(n_layers=2, n_heads=4, d_head=3, d_vocab=61, n_ctx=16)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(61, 12)
            self.blocks = nn.ModuleList(Block(self) for _ in range(2))
            self.classes = nn.Linear(12, 3)
        self.setup()

    def forward(self, tokens: Tensor) -> Any:
        x, self.secret = self.embed(tokens), 0.0
        for block in self.blocks:
            x = block(x)
        x = self.classes(x.mean(1))
        return {"classes": x} if self.trait == "talkative" else x


@pytest.mark.parametrize("trait", ["plain", "proud", "secretive", "full", "noisy", *SHARING])
@pytest.mark.usefixtures("unchecked")
def test_models_that_do_not_bear_shortcuts(trait: str) -> None:
    model = Micro(trait).eval()
    agree(head_ablation(model, TOKENS, mass, progress=False), loop(model, mass, n_heads=4))
    one = TOKENS[:1]
    if trait != "proud":  # for which a single text is nothing at all
        agree(head_ablation(model, one, mass, progress=False), loop(model, mass, one, n_heads=4))


def _stream(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "texts"), [("block", 2), ("block", 1), ("attention", 1)])
def test_what_a_block_reads_from_an_earlier_one_past_the_stream(part: str, texts: int) -> None:
    """A skip from layer 1 to layer 3 of six: not into the last block, so that this alone shows nothing."""
    model, tokens, kept = zoo.bridge("llama-gqa", num_hidden_layers=6), TOKENS[:texts], dict[str, Tensor]()
    giver, taker = (model.blocks[n] if part == "block" else model.blocks[n].attn for n in (1, 3))

    def take(module: Any, args: Any, output: Any) -> Any:
        changed = _stream(output) + 0.7 * kept["given"]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    giver.register_forward_hook(lambda module, args, output: kept.update(given=_stream(output)))
    taker.register_forward_hook(take)
    expected = loop(model, tokens=tokens)
    agree(head_ablation(model, tokens, progress=False), expected)
    effects = head_effects(model, tokens, ablate_heads(model, None), exact="all", progress=False)
    with torch.no_grad():
        baseline = float(loss(model(tokens), tokens).double().mean())
    agree(effects.assign(value=effects["exact"] + baseline), expected)


@pytest.mark.slow
def test_texts_of_a_batch_that_see_each_other_in_some_batches_alone() -> None:
    """A cap on the whole batch that changes of layer 0 hardly reach."""
    model, tokens, largest = zoo.bridge("llama-gqa", num_hidden_layers=3), TOKENS[:1], dict[int, list[float]]()
    layer = -1

    def note(module: Any, args: Any, output: Tensor) -> None:
        largest.setdefault(layer, []).append(output.abs().max().item())

    last = model.blocks[2].mlp
    noting = last.register_forward_hook(note)
    for layer in (0, 1):
        for head in range(8):
            with torch.no_grad(), model.hooks(fwd_hooks=ablate_heads(model, [(layer, head)])):
                model(tokens)
    noting.remove()
    few = sorted(range(8), key=lambda head: largest[0][head])[:4]
    cap = (largest[0][few[-1]] + max(largest[1])) / 2
    assert largest[0][few[-1]] < cap < max(largest[1])
    last.register_forward_hook(lambda module, args, output: output * min(1.0, cap / output.abs().max().item()))
    heads = [*((0, head) for head in few), *((1, head) for head in range(8))]
    table = head_ablation(model, tokens, loss, heads=heads, progress=False)
    whole = loop(model, tokens=tokens)
    agree(table, torch.stack([whole[8 * layer + head] for layer, head in sorted(heads)]))


@pytest.mark.parametrize("texts", [2, *slow([3, 5])])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_an_unembedding_that_has_no_memory_for_many_texts(kind: str, name: str, texts: int) -> None:
    model = zoo.load(kind, name)

    def limit(module: Any, args: Any) -> None:
        if len(args[0]) > texts:
            raise torch.OutOfMemoryError

    expected = loop(model, tokens=TOKENS[:2])
    model.unembed.register_forward_pre_hook(limit)
    agree(head_ablation(model, TOKENS[:2], progress=False), expected)


def test_any_output_for_a_metric_that_knows_it() -> None:
    def metric(output: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return mass(output["classes"], tokens)

    reached = head_ablation(Micro("plain"), TOKENS, mass, progress=False)
    with pytest.raises(ValueError, match="layer 0"):
        head_ablation(Micro("deaf"), TOKENS, mass, progress=False)
    assert len(reached) == 8


def test_dropout_is_off_meanwhile() -> None:
    model = Micro("noisy").eval()
    quiet = head_ablation(model, TOKENS, mass, progress=False)
    model.train()
    model.blocks[0].eval()
    pd.testing.assert_frame_equal(head_ablation(model, TOKENS, mass, progress=False), quiet)
    assert [model.training, model.blocks[0].training, model.blocks[1].training] == [True, False, True]


@pytest.mark.parametrize("options", [{}, {"keys_from": "input", "encoding": "mla"}, {"causal": True}])
def test_synthetic_models(options: dict[str, Any]) -> None:
    sizes = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 64, "d_vocab": 61, "n_ctx": 24, "n_out": 7}
    config = SyntheticConfig(**sizes, seed=1, **options)
    model = SyntheticModel(config).eval()
    agree(head_ablation(model, TOKENS, mass, progress=False), loop(model, mass, n_heads=4))
    with pytest.raises(ValueError, match=r"model must return logits .* got shape \(3, 7\) .* pass metric="):
        head_ablation(model, TOKENS, progress=False)


# --- metrics ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_a_metric_gets_logits_and_tokens_once_for_every_head(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    seen = []
    head_ablation(model, TOKENS, lambda x, t: seen.append((x.shape, torch.equal(t, TOKENS))) or 0, progress=False)
    assert seen == [((3, 9, 61), True)] * (1 + model.cfg.n_layers * 8)
    values: list[float] = []  # in the order of the rows, whatever that of the heads
    metric = lambda x, t: values.append(float(loss(x, t).mean())) or values[-1]  # noqa: E731
    assert head_ablation(model, TOKENS, metric, heads=[6, 1], progress=False)["value"].tolist() == values[1:]


@pytest.mark.usefixtures("unchecked")
def test_a_head_that_fails_is_a_row_of_nan(shared_model: Any) -> None:
    """The others are as without it; where all fail, the error is raised."""
    model, calls = shared_model("bridge", "llama-gqa"), []

    def metric(logits: Tensor, tokens: Tensor) -> Tensor:
        calls.append(1)
        return loss(logits, tokens) * (torch.nan if len(calls) == 4 else 1)  # the baseline, heads 0, 1 and 2

    with pytest.warns(UserWarning, match=r"1 of the heads .* L0H2: ArgumentError: metric must return finite numbers"):
        table = head_ablation(model, TOKENS, metric, layers=0, progress=False)
    expected = head_ablation(model, TOKENS, layers=0, progress=False)
    expected.loc[2, ["value", "effect"]] = torch.nan
    pd.testing.assert_frame_equal(table, expected, atol=rounding(LOSS, 2))
    assert list(table.attrs["failures"]) == ["L0H2"]
    values = iter([1.0])
    with pytest.raises(ValueError, match="metric must return finite numbers"):
        head_ablation(model, TOKENS, lambda x, t: next(values, torch.nan), layers=0, progress=False)
