"""Labels of heads: their measures by hand and by TransformerLens's detector, and heads that are made to be such."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import head_labels, random_control
from tl_posdisent.experiments.attention_scores import head_labels as module
from tl_posdisent.experiments.attention_scores.head_labels import repeated_tokens

TOKENS = zoo.random_tokens(length=14, batch=2)
MEASURES = ["previous_token", "duplicate_token", "induction", "first_token", "local", "entropy"]
OPTIONS: dict[str, Any] = {"length": 9, "progress": False}
pytestmark = pytest.mark.usefixtures("unchecked")


def patterns(model: Any, tokens: Tensor) -> Tensor:
    """``[layer, batch, head, query, key]``."""
    with torch.no_grad():
        cache = model.run_with_cache(tokens)[1]
    return torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)]).double()


def labels(model: Any, tokens: Tensor | None = TOKENS, **more: Any) -> pd.DataFrame:
    return head_labels(model, tokens, **(OPTIONS | more))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gpt2", "gpt_oss"))
def test_measures_by_hand(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = labels(model)
    x, copied = patterns(model, TOKENS), repeated_tokens(model, 9, 4, 0)
    again, n_text = patterns(model, copied), TOKENS.shape[1]
    start = copied.shape[1] - 18
    share = x[..., 1:, :] / x[..., 1:, :].sum(-1, keepdim=True)
    second = range(start + 9, start + 18)
    wanted = {
        "previous_token": sum(x[..., i, i - 1] for i in range(1, n_text)) / (n_text - 1),
        "first_token": x[..., 1:, 0].mean(-1),
        "local": sum(x[..., i, i - 7 : i + 1].sum(-1) for i in range(8, n_text)) / (n_text - 8),
        "entropy": -(share * share.clamp_min(1e-300).log()).sum(-1).mean(-1),
        "duplicate_token": sum(again[..., i, i - 9] for i in second) / 9,
        "induction": sum(again[..., i, i - 8] for i in second) / 9,
    }
    for column, values in wanted.items():
        assert table[column].tolist() == pytest.approx(values.mean(1).flatten().tolist(), abs=1e-6), column
    assert table[["layer", "head"]].values.tolist() == [[x, h] for x in range(model.cfg.n_layers) for h in range(8)]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_scores_of_transformer_lens(kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its detector divides by all rows, ours by the queries that the label is about."""
    monkeypatch.setattr(module, "N_SEQUENCES", 1)
    detector = pytest.importorskip("transformer_lens.head_detector")
    model = shared_model(kind, name)
    table = labels(model, None)
    tokens = repeated_tokens(model, 9, 1, 0)
    rows = tokens.shape[1]
    cfg = {"device": "cpu", "n_ctx": 100, "n_layers": model.cfg.n_layers, "n_heads": 8, "dtype": torch.float32}
    stub = SimpleNamespace(
        cfg=SimpleNamespace(**cfg), to_tokens=lambda seq: tokens, run_with_cache=model.run_with_cache
    )
    for column, queries in (("previous_token", rows - 1), ("duplicate_token", 9), ("induction", 9)):
        theirs = detector.detect_head(stub, "unused", f"{column}_head").flatten() * rows / queries
        assert table[column].tolist() == pytest.approx(theirs.tolist(), abs=1e-5), column


def test_the_token_that_begins_texts(shared_model: Any) -> None:
    """A bridge has its model's configuration; TransformerLens gives tokenizers a token beyond the vocabulary."""
    models = {kind: shared_model(kind, "llama-gqa") for kind in ("bridge", "hooked")}
    starts = {kind: labels(model).attrs["start_token"] for kind, model in models.items()}
    assert starts == {"bridge": 1, "hooked": None}
    known = SimpleNamespace(bos_token_id=1, pad_token_id=0)
    for bos in (1, 61):
        known.bos_token_id = bos
        fake = {"cfg": SimpleNamespace(d_vocab=61, n_ctx=128), "tokenizer": known, "parameters": lambda: iter(())}
        first = repeated_tokens(SimpleNamespace(**fake), 9, 1, 0)[0]
        assert first.tolist() == [1] * (bos == 1) + first[-9:].tolist() * 2


def planted(kinds: dict[int, str], n: int | None = None) -> Any:
    """A hook that makes some heads of a layer attend to one key each."""

    def edit(scores: Tensor, hook: Any) -> Tensor:
        at = torch.arange(scores.shape[-1])
        half = scores.shape[-1] // 2
        key = {
            "previous_token": (at - 1).clamp_min(0),
            "duplicate_token": torch.where(at >= scores.shape[-1] - half, at - half, at),
            "induction": torch.where(at >= scores.shape[-1] - half, at - half + 1, at),
            "first_token": 0 * at,
            "local": at,
        }
        scores = scores.clone()
        for head, kind in kinds.items():
            scores[:, head, at, key[kind]] = 1e3
        return scores

    return edit


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_heads_that_are_made_to_be_such(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    kinds = dict(enumerate(("previous_token", "duplicate_token", "induction", "first_token", "local")))
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", planted(kinds))]):
        table = labels(model, None, length=24)
    own = table[table["layer"] == 1].set_index("head")
    assert own["label"][:5].tolist() == list(kinds.values())
    for head, column in kinds.items():
        assert own.loc[head, column] == pytest.approx(1, abs=1e-5)
        assert own.loc[head, f"{column}_random"] < 0.5
        assert own.loc[head, "entropy"] < (1 if column in ("duplicate_token", "induction") else 1e-3)
    plain = labels(model, None, length=24)
    pd.testing.assert_frame_equal(table[table["layer"] == 0], plain[plain["layer"] == 0])


def test_random_columns_are_those_of_random_copies(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    table = labels(model, seeds=[3, 4])
    copies = [labels(copy, seeds=[0]) for copy in random_control(model, [3, 4])]
    for name in MEASURES:
        wanted = (copies[0][name] + copies[1][name]) / 2
        assert table[f"{name}_random"].tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


@pytest.mark.parametrize("none", [0, (), []])
def test_without_a_random_copy(none: Any, shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("bridge", "llama-gqa")
    monkeypatch.setattr(module, "_LABEL_THRESHOLD", 0.2)
    alone, beside = labels(model, seeds=none), labels(model)
    pd.testing.assert_frame_equal(alone[["layer", "head", *MEASURES]], beside[["layer", "head", *MEASURES]])
    for _, row in alone.iterrows():
        named = [name for name in MEASURES[:4] if row[name] >= 0.2]
        assert row["label"] == "+".join(named or ["local"] * (row["local"] >= 0.2))
    assert len(set(alone["label"])) > 1


def test_local_keys_of_short_texts(shared_model: Any) -> None:
    """Of a text of five tokens, the last four: what its last query gives to all keys but the first."""
    model = shared_model("bridge", "llama-gqa")
    wanted = patterns(model, TOKENS[:, :5])[..., 4, 1:].sum(-1).mean(1)
    assert labels(model, TOKENS[:, :5])["local"].tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-6)


def test_padded_texts_are_measured_alone(shared_model: Any) -> None:
    model, mask = shared_model("bridge", "llama-gqa"), torch.ones_like(TOKENS)
    mask[0, :5] = 0
    got = labels(model, attention_mask=mask)
    alone = [labels(model, x) for x in (TOKENS[:1, 5:], TOKENS[1:])]
    for name in MEASURES:
        assert got[name].tolist() == pytest.approx(((alone[0][name] + alone[1][name]) / 2).tolist(), abs=1e-6)


def test_repeated_tokens(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    tokens = repeated_tokens(model, 9, 3, 5)
    one, two = tokens[:, -18:-9], tokens[:, -9:]
    assert torch.equal(one, two)
    assert all(len(row.unique()) == 9 for row in one)
    assert torch.equal(tokens, repeated_tokens(model, 9, 3, 5))
    assert not torch.equal(tokens, repeated_tokens(model, 9, 3, 6))
