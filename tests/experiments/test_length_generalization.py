"""What grows with the text: every column by its definition, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import (
    fit_additive,
    lambda_mask,
    length_generalization,
    load_model,
    read_model,
)
from tl_posdisent.experiments.robustness.length_generalization import (
    largest_by_query,
    share_key,
)

TOKENS = zoo.random_tokens(40, batch=3)
EDGES = [4, 16, 24, 40]
SOME = zoo.cases("llama-gqa")


def table(model: Any, *arguments: Any, **options: Any) -> Any:
    return length_generalization(model, *arguments, progress=False, **options)


def seen(model: Any, tokens: Tensor, hooks: list[Any], layer: int) -> dict[str, Tensor]:
    names = {short: f"blocks.{layer}.attn.{short}" for short in ("hook_attn_scores", "hook_pattern")}
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        logits, cache = model.run_with_cache(tokens, names_filter=list(names.values()))
    return {"logits": logits.double(), **{short: cache[name].double() for short, name in names.items()}}


# --- figures of each query --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_share_of_the_key_is_that_of_the_fit(hooked: bool, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = read_model(model).specs(1)[0]
    hooks = lambda_mask(model, 2, 6, 4) if hooked else []
    scores = seen(model, TOKENS, hooks, 1)["hook_attn_scores"]
    distance = torch.arange(40)[:, None] - torch.arange(40)
    inside = spec.sees(distance) & ((torch.arange(40) < 2) | (distance < (6 if hooked else 40)))
    for start, stop in ((0, 40), (16, 24), (39, 40)):
        got = share_key(scores, spec, start, stop)
        if stop - start == 1:  # every key its own mean
            torch.testing.assert_close(got, torch.ones_like(got))
            continue
        fit = fit_additive(scores[:, :, start:stop, :stop], mask=inside[start:stop, :stop])
        torch.testing.assert_close(got, fit.share_key)
    assert share_key(torch.full_like(scores, 0.1), spec).isnan().all()
    largest = torch.where(inside, scores, -torch.inf).amax(-1)
    torch.testing.assert_close(largest_by_query(scores, spec), largest)


# --- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(("kind", "name"), SOME)
def test_every_column_by_its_definition(kind: str, name: str, hooked: bool, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = lambda_mask(model, 2, 6, 6) if hooked else []
    got = table(model, TOKENS, EDGES, hooks, by="head")
    assert len(got) == 3 * 2 * 8
    for layer in (0, 1):
        there = seen(model, TOKENS, hooks, layer)
        surprise = -there["logits"].log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
        for start, stop in pairwise(EDGES):
            rows = got[(got["start"] == start) & (got["layer"] == layer)].sort_values("head")
            assert rows["stop"].unique().tolist() == [stop]
            loss = surprise[:, start:stop].mean().item()
            assert rows["loss"].tolist() == pytest.approx([loss] * 8, rel=1e-5)
            pattern = there["hook_pattern"][:, :, start:stop]
            entropy = -(pattern * pattern.clamp_min(1e-30).log()).sum(-1).mean((0, 2))
            assert rows["entropy"].tolist() == pytest.approx(entropy.tolist(), rel=1e-4)
            scores = there["hook_attn_scores"]
            largest = largest_by_query(scores, read_model(model).specs(layer)[0])[:, :, start:stop].mean((0, 2))
            assert rows["largest_score"].tolist() == pytest.approx(largest.tolist(), rel=1e-4)
            shares = share_key(scores, read_model(model).specs(layer)[0], start, stop).mean(0)
            assert rows["share_key"].tolist() == pytest.approx(shares.tolist(), rel=1e-4)


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_rows_are_means_of_rows(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    head, layer, bucket = (table(model, TOKENS, EDGES, by=by) for by in ("head", "layer", "bucket"))
    measures = ["loss", "entropy", "largest_score", "share_key"]
    assert list(head.columns) == ["start", "stop", "layer", "head", *measures]
    assert list(bucket.columns) == ["start", "stop", *measures]
    for fine, coarse, keys in ((head, layer, ["start", "stop", "layer"]), (layer, bucket, ["start", "stop"])):
        expected = fine.groupby(keys)[measures].mean().reset_index()
        torch.testing.assert_close(torch.tensor(coarse[measures].values), torch.tensor(expected[measures].values))
    one = table(model, TOKENS, EDGES, by="head", layers=[1]).drop(columns="layer")
    both = head[head["layer"] == 1].drop(columns="layer").reset_index(drop=True)
    torch.testing.assert_close(torch.tensor(one.values), torch.tensor(both.values))


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_what_follows_the_last_edge_is_not_read(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    changed = TOKENS.clone()
    changed[:, 25:] = TOKENS[:, 25:].flip(0)
    first, second = (table(model, x, EDGES[:3]) for x in (TOKENS, changed))
    assert first.equals(second)
    assert not first.equals(table(model, changed.roll(1, 1), EDGES[:3]))


def test_layers_that_would_not_use_edited_scores_say_nothing_of_them(shared_model: Any) -> None:
    model = shared_model("bridge", "gptj")
    plain, edited = table(model, TOKENS, EDGES), table(model, TOKENS, EDGES, lambda_mask(model, 1, 4, 4))
    assert plain["entropy"].notna().all()
    assert edited[["entropy", "largest_score", "share_key"]].isna().all(axis=None)
    assert (edited["loss"] - plain["loss"]).abs().min() > 1e-3


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_texts_beyond_the_context(kind: Any, name: str, tmp_path: Path) -> None:
    """Saved with a context of 128, and loaded with one of 200."""
    zoo.hf_model(name).save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path, backend=kind, n_ctx=200), zoo.random_tokens(200, batch=1)
    rows = table(model, tokens, [0, 128, 200])
    longer = zoo.hf_model(name, **{"n_positions" if name == "gptj" else "max_position_embeddings": 200})
    with torch.no_grad():
        logits = longer(tokens, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
    assert rows["loss"].tolist() == pytest.approx([x.mean().item() for x in (losses[:128], losses[128:])], rel=1e-3)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_too_long_for_learned_positions(shared_model: Any) -> None:
    model = shared_model("bridge", "gpt2")
    assert table(model, zoo.random_tokens(128), [0, 64, 128])["loss"].notna().all()
    with pytest.raises(ValueError, match=r"tokens are 130 long, and the model fails beyond its context of 128"):
        table(model, zoo.random_tokens(130), [0, 64, 130])


@pytest.mark.usefixtures("unchecked")
def test_logits_that_are_not_finite(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")

    def spoil(x: Tensor, hook: Any) -> Tensor:
        return x * torch.nan

    with pytest.raises(ValueError, match="the model's logits are not finite"):
        table(model, TOKENS, EDGES, [("blocks.1.attn.hook_z", spoil)])
