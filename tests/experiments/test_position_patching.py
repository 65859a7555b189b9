"""Rotated vectors moved between runs: brute force over distances, everything and nothing moved, both classes alike."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.edited_scores import Call
from support.intervention_cases import (
    REAL,
    TOKENS,
    UNORDERED,
    by_brute_force,
    close,
    edited,
    every_way,
    logits,
    mixed_of,
)
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import capture, position_patching, swap_positions
from tl_posdisent.hooks import patch_vectors
from tl_posdisent.hooks.hook_list import joined
from tl_posdisent.models.capture import listen_vectors
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = pytest.mark.usefixtures("unchecked")  # doctests run with the checks of annotations
HEAD = 5


def vectors(model: Any, positions: Tensor | None = None) -> dict[int, dict[str, Tensor]]:
    """Rotated queries and keys of every rotary layer, at these positions."""
    specs = read_model(model).rotary(None, "test")
    held: dict[int, dict[str, Tensor]] = {spec.layer: {} for spec in specs}
    hooks = [] if positions is None else swap_positions(model, positions)
    logits(model, hooks + [hook for spec in specs for hook in listen_vectors(spec, positions, held[spec.layer])])
    return held


def patched(model: Any, layer: int, source: dict[str, Tensor], which: str = "qk", **options: Any) -> list[Hook]:
    """``patch_vectors`` with the queries, the keys or both of another run."""
    return patch_vectors(model, layer, *(source[x] if x in which else None for x in "qk"), **options)


@every_way
def test_vectors_are_those_of_capture(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for captured in capture(model, TOKENS, scores=False):
        held = vectors(model)[captured.layer]
        close(held["q"].float(), captured.q_rot, rounding(captured.q_rot, 2))
        close(held["k"].float(), captured.k_rot, rounding(captured.k_rot, 2))


@every_way
def test_own_vectors_change_nothing_and_clean_ones_undo_every_lie(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, lying = logits(model, []), logits(model, swap_positions(model, UNORDERED))
    clean, other = vectors(model), vectors(model, UNORDERED)
    own = joined(patched(model, layer, clean[layer], heads=[2, layer]) for layer in clean)
    close(logits(model, own), plain)
    swap = swap_positions(model, UNORDERED)
    back = joined(patched(model, layer, clean[layer]) for layer in clean)
    nothing = joined(patched(model, layer, other[layer]) for layer in clean)
    there = joined(patched(model, layer, other[layer]) for layer in clean)
    assert (lying - plain).abs().max() > 0.1
    for hooks, expected in ((swap + back, plain), (swap + nothing, lying), (there, lying)):
        close(logits(model, hooks), expected)


@every_way
@pytest.mark.parametrize("which", ["q", "k", "qk"])
def test_one_head_by_brute_force(kind: str, name: str, which: str, shared_model: Any) -> None:
    """In the first layer tokens are the same in both runs, and each side stands where it stood in its run."""
    model = shared_model(kind, name)
    clean, spec = vectors(model)[0], read_model(model).specs([0])[0]
    moved, real = UNORDERED.double(), REAL.double().expand(2, -1)
    for keys in ("group", "head"):
        queries, seen = (x[:, None].repeat(1, 8, 1) for x in (moved, moved))
        if "q" in which:
            queries[:, HEAD] = real
        if "k" in which:
            shared = [h for h in range(8) if spec.key_head(h) == spec.key_head(HEAD)]
            seen[:, [HEAD] if keys == "head" else shared] = real[:, None]
        expected = by_brute_force(model, queries[..., :, None] - seen[..., None, :])
        hooks = patched(model, 0, clean, which, heads=[HEAD], keys=keys)
        close(mixed_of(model, swap_positions(model, UNORDERED) + hooks), expected, layers=1)
        q, k = (clean[x] if x in which else None for x in "qk")
        calls = [Call("swap_positions", positions=UNORDERED)]
        calls.append(Call("patch_vectors", q_rot=q, k_rot=k, heads=[HEAD], keys=keys))
        close(edited(model, calls), expected, layers=1)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gptj"))
def test_sixteen_bits(name: str) -> None:
    model = zoo.bridge(name).to(torch.bfloat16)
    plain, lying = logits(model, []), logits(model, swap_positions(model, UNORDERED))
    clean = vectors(model)
    back = joined(patched(model, layer, clean[layer]) for layer in clean)
    for hooks in (back, swap_positions(model, UNORDERED) + back):
        assert (logits(model, hooks) - plain).abs().mean() < 0.02 * (lying - plain).abs().mean()


# --- the table ------------------------------------------------------------------------------------------------


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def table(model: Any, positions: Tensor = UNORDERED, **options: Any) -> pd.DataFrame:
    return position_patching(model, TOKENS, positions, progress=False, **options)


@pytest.mark.parametrize("positions", [UNORDERED, UNORDERED[0]], ids=["by text", "of all"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_table_is_a_loop_over_hooks(kind: str, name: str, positions: Tensor, shared_model: Any) -> None:
    """Positions of all texts allow shortcuts, those by text do not."""
    model = shared_model(kind, name)
    clean, corrupted = vectors(model), vectors(model, positions)
    swap = swap_positions(model, positions)
    good, bad = (loss(logits(model, hooks), TOKENS).mean().item() for hooks in ([], swap))
    for what, which, direction in (("head", "qk", "denoise"), ("query", "q", "noise"), ("key", "k", "denoise")):
        rows = table(model, positions, what=what, direction=direction, layers=[1], heads=[HEAD, 0]).to_dict("records")
        assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, HEAD)]
        for row in rows:
            if direction == "denoise":
                hooks = swap + patched(model, 1, clean[1], which, heads=[row["head"]])
            else:
                hooks = patched(model, 1, corrupted[1], which, heads=[row["head"]])
            value = loss(logits(model, hooks), TOKENS).mean().item()
            assert row["clean"] == pytest.approx(good, abs=rounding(good))
            assert row["corrupted"] == pytest.approx(bad, abs=rounding(bad))
            assert row["value"] == pytest.approx(value, abs=rounding(value, 2))
            share = 3 * rounding(bad) / abs(good - bad)  # of three losses
            assert row["effect"] == pytest.approx((row["value"] - bad) / (good - bad), abs=share)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "olmo2", "gemma2"))
@pytest.mark.parametrize("options", [{}, {"what": "layer"}, {"what": "key"}, {"keys": "head"}], ids=str)
def test_values_are_those_of_full_passes(kind: str, name: str, options: Any, shared_model: Any) -> None:
    """Which alone are made where a hook of the user's may count on every block to run."""
    model = shared_model(kind, name)
    ours = table(model, UNORDERED[0], **options)
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: x)]):
        expected = table(model, UNORDERED[0], **options)
    pd.testing.assert_frame_equal(ours, expected, atol=1e-5)
    assert ours["effect"].abs().max() > 1e-3


def test_where_one_layer_rotates_it_carries_everything(shared_model: Any) -> None:
    model = shared_model("bridge", "smollm3")
    assert table(model, what="layer")["effect"].tolist() == pytest.approx([1], abs=1e-5)
    assert table(model, what="layer", direction="noise")["effect"].tolist() == pytest.approx([0], abs=1e-5)
    assert table(model, what="layer")["layer"].tolist() == [0]
    together = table(model, what="layer", heads=[HEAD])
    assert together["value"].tolist() == pytest.approx(table(model, heads=[HEAD])["value"].tolist(), abs=1e-6)


def test_key_heads_are_patched_once_and_reported_for_all_who_read_them(shared_model: Any) -> None:
    model, asked = shared_model("bridge", "llama-gqa"), []

    def metric(logits: Tensor, tokens: Tensor) -> Tensor:
        asked.append(1)
        return loss(logits, tokens)

    keys = table(model, what="key", metric=metric)
    assert len(asked) == 3 + 2 * 4
    assert len(keys) == 16
    pairs = keys["effect"].to_numpy().reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert len(set(pairs[:, 0])) == 8
    alone = table(model, what="key", keys="head")["effect"].to_numpy().reshape(-1, 2)
    assert (abs(alone[:, 0] - alone[:, 1]) > 1e-4).all()


def test_hooks_of_the_user_act_in_every_run() -> None:
    model = zoo.bridge("llama-gqa")
    model.hook_dict["blocks.0.attn.hook_z"].add_hook(lambda x, hook: 2 * x)
    expected = loss(logits(model, []), TOKENS).mean().item()
    assert table(model, layers=[0], heads=[0])["clean"][0] == pytest.approx(expected, abs=rounding(expected))
    assert len(model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks) == 1


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_models_without_rotation_in_reach(name: str, shared_model: Any) -> None:
    for call in (lambda m: table(m), lambda m: patch_vectors(m, 0, torch.zeros(2, 12, 8, 8), None)):
        with pytest.raises(ValueError, match=r"needs rotary position embeddings \(RoPE\) that hooks can reach"):
            call(shared_model("bridge", name))
