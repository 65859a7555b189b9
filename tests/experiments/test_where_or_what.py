"""``where_or_what`` against plain runs with hooks, one head and replacement at a time, and divergences by torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow
from torch import Tensor

from tl_posdisent import ablate_heads, demo_tokens, describe_head, load_demo_model, remap_distance, where_or_what
from tl_posdisent.hooks import fitted_attention, substitute_attention

FITTED, MEASURED = zoo.random_tokens(12, 4, seed=1), zoo.random_tokens(11, 3, seed=2)
LENGTHS = (9, 12, 7, 12, 10)
KL_CLOSE = 2e-6  # nats, of divergences by float32 logits, as in test_head_effects.py
SHARES = ["where_unclipped", "what_unclipped", "uniform_unclipped", "contribution"]
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))


def measured(model: Any, *texts: Any, **options: Any) -> pd.DataFrame:
    return where_or_what(model, *texts, **{"progress": False, "draws": 1, "exact": 1} | options)


def divergence(model: Any, text: Tensor, hooks: Any) -> float:
    """KL(unmodified ‖ under hooks) of a text, nats per prediction."""
    with torch.no_grad():
        clean = model(text[None])[0, :-1].double().log_softmax(-1)
        with model.hooks(fwd_hooks=hooks):
            changed = model(text[None])[0, :-1].double().log_softmax(-1)
    return float(torch.nn.functional.kl_div(changed, clean, log_target=True, reduction="sum")) / len(clean)


def own_apart(distance: float, distances: Tensor) -> Tensor:
    """Put every key at one distance but the query's own."""
    return torch.where(distances == 0, 0.0, distance)


def plain_row(model: Any, fitted: Any, texts: list[Tensor], layer: int, head: int) -> dict[str, float]:
    """Return one row of the table by one run for each replacement and text; the constants are chosen by loops."""
    one: dict[str, Any] = {"layers": layer, "heads": [head]}
    mean = ablate_heads(model, mode="mean", reference=fitted, **one)
    distance = fitted_attention(model, fitted, "distance+sink", **one)
    uniform = substitute_attention(model, "uniform", **one)
    constants = [remap_distance(model, partial(own_apart, d), **one) for d in (1, 5, 32)]
    k = np.array(
        [[divergence(model, text, hooks) for text in texts] for hooks in (mean, distance, uniform, *constants)]
    )
    n = np.array([len(text) - 1 for text in texts])
    of_constant = k[3:] * n
    chosen = [of_constant[np.argmin(of_constant.sum(1) - of_constant[:, t]), t] for t in range(len(texts))]
    contributed = k[0] @ n
    return {
        "where_unclipped": 1 - k[1] @ n / contributed,
        "uniform_unclipped": 1 - k[2] @ n / contributed,
        "what_unclipped": 1 - sum(chosen) / contributed,
        "contribution": contributed / n.sum(),
        "content_distance": (1, 5, 32)[int(np.argmin(of_constant.sum(1)))],
    }


def same_as_plain(model: Any, table: pd.DataFrame, fitted: Any, texts: list[Tensor]) -> None:
    for row in table.to_dict("records"):
        expected = plain_row(model, fitted, texts, row["layer"], row["head"])
        assert row["contribution"] == pytest.approx(expected["contribution"], abs=KL_CLOSE)
        for name in ("where_unclipped", "what_unclipped", "uniform_unclipped"):
            close = 2 * KL_CLOSE / expected["contribution"] * (1 + abs(expected[name]))
            assert row[name] == pytest.approx(expected[name], abs=close)
        assert row["content_distance"] == expected["content_distance"]


# --- exact rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    zoo.cases("llama-gqa", "gptj", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v2", "falcon", "gemma4"),
)
def test_exact_rows_are_those_of_plain_runs(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = measured(model, FITTED, MEASURED, exact=["L0H1", "L1H6"])
    assert table.loc[table["exact"], ["layer", "head"]].to_numpy().tolist() == [[0, 1], [1, 6]]
    run = table[table["exact"]]
    same_as_plain(model, run, FITTED, list(MEASURED))
    assert (run["contribution"] > 100 * KL_CLOSE).all()
    assert run["where_unclipped"].sub(run["what_unclipped"]).abs().max() > 0.01


@FEW
def test_each_half_is_measured_with_fits_to_the_other(kind: str, name: str, shared_model: Any) -> None:
    """Losses add up over the halves; the constants are chosen in all other texts."""
    model, texts = shared_model(kind, name), torch.cat([FITTED, FITTED.flip(1)])
    some: dict[str, Any] = {"heads": [1, 6], "exact": "all"}
    whole = measured(model, texts, **some)
    halves = [measured(model, texts[1::2], texts[::2], **some), measured(model, texts[::2], texts[1::2], **some)]
    contributed = sum(x["contribution"] for x in halves) / 2
    lost = sum((1 - x["where_unclipped"]) * x["contribution"] for x in halves) / 2
    assert whole["contribution"].tolist() == pytest.approx(contributed.tolist(), rel=1e-5, abs=KL_CLOSE)
    assert whole["where_unclipped"].tolist() == pytest.approx((1 - lost / contributed).tolist(), abs=1e-3)


@FEW
@pytest.mark.parametrize("side", ["left", *slow(["right"])])
def test_padding_changes_nothing(kind: str, name: str, side: str, shared_model: Any) -> None:
    """Of fitted and measured texts of unequal lengths; each text is run alone by the plain loops."""
    model, texts = shared_model(kind, name), [zoo.random_tokens(n, 1, seed=n + i)[0] for i, n in enumerate(LENGTHS)]
    pad = [((12 - len(x), 0) if side == "left" else (0, 12 - len(x)), x) for x in texts]
    ids = torch.stack([torch.nn.functional.pad(x, ends) for ends, x in pad])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(x), ends) for ends, x in pad])
    table = measured(model, FITTED, {"input_ids": ids, "attention_mask": mask}, exact=["L1H3"])
    same_as_plain(model, table[table["exact"]], FITTED, texts)
    swapped = measured(model, {"input_ids": ids, "attention_mask": mask}, MEASURED)
    backwards = measured(model, {"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}, MEASURED)
    assert swapped["where_unclipped"].tolist() == pytest.approx(backwards["where_unclipped"].tolist(), abs=1e-3)


def pooling_model() -> Any:
    """Build a model whose second layer averages over all positions what the first layer's head brings to each.

    Tokens are +1 or -1. The head of layer 0 attends to the previous token (two waves that peak at distance 1), that of
    layer 1 to all alike; logits are ±3 times the average.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config: dict[str, Any] = {"n_layers": 2, "n_heads": 1, "d_model": 3, "d_head": 8, "d_vocab": 2, "n_ctx": 64}
    config |= {"attn_only": True, "normalization_type": None, "positional_embedding_type": "rotary", "rotary_dim": 8}
    model = HookedTransformer(HookedTransformerConfig(**config, rotary_base=1000, device="cpu"))
    first, second = (block.attn for block in model.blocks)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
        model.embed.W_E[:, 0] = first.W_V.new_tensor([-1.0, 1.0])
        for plane in (0, 1):
            angle = torch.tensor(1000.0 ** (-plane / 4))
            first.b_Q[0, plane] = 30 * 8**0.5
            first.b_K[0, [plane, plane + 4]] = torch.stack([angle.cos(), angle.sin()])
        first.W_V[0, 0, 0] = first.W_O[0, 0, 1] = second.W_V[0, 1, 0] = second.W_O[0, 0, 2] = 1
        model.unembed.W_U[2] = 3 * first.W_V.new_tensor([-1.0, 1.0])
    return model


def test_estimates_leave_out_what_positions_do_together() -> None:
    """A later layer averages: topics add up over positions and noise does not. Estimates see each position alone, so
    the contribution is too small by far, and the noise of another pattern too large a part of it. Runs see all."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.tensor([0.8, 0.2]).repeat(8)[:, None]  # of +1 in a text: its topic
    texts = (torch.rand(16, 48, generator=generator) < probability).long()
    model = pooling_model()
    estimated, run = (measured(model, texts, exact=exact, draws=16).iloc[0] for exact in (0, "all"))
    assert estimated["contribution"] < 0.1 * run["contribution"]
    assert run["uniform"] > 0.95
    assert estimated["uniform"] < 0.8
    assert min(estimated["where"], run["where"]) > 0.99


# --- the table --------------------------------------------------------------------------------------------------


def test_rows_columns_and_attributes(shared_model: Any) -> None:
    table = measured(shared_model("bridge", "llama-gqa"), FITTED, exact=3)
    columns = ["layer", "head"]
    for name in ("where", "what", "uniform"):
        columns += [name, f"{name}_se", f"{name}_unclipped"]
    assert list(table) == [*columns, "contribution", "contribution_se", "content_distance", "exact", "verdict"]
    assert table[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in (0, 1) for head in range(8)]
    assert table["exact"].sum() == 3
    assert set(table["content_distance"]) <= {1, 5, 32}
    for name in ("where", "what", "uniform"):
        assert table[name].tolist() == table[f"{name}_unclipped"].clip(0, 1).tolist()
    for verdict, words in (("neither", "the pattern does not matter"), ("undecided", "are undecided")):
        of_verdict = table["verdict"] == verdict
        part = 100 * table["contribution"][of_verdict].sum() / table["contribution"].sum()
        said = f" {of_verdict.sum()} ({part:.0f} %) {words}" if of_verdict.any() else f" 0 {words}"
        assert said in table.attrs["statement"]
    assert table.attrs["passes"] > 4


def test_some_heads_have_the_rows_that_they_have_among_all(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    whole = measured(model, FITTED, heads=[2, 5, 6], exact="all")
    some = measured(model, FITTED, layers=1, heads=[2, 5], exact="all")
    assert some[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 5]]
    expected = whole[(whole["layer"] == 1) & whole["head"].isin([2, 5])]
    np.testing.assert_allclose(some[SHARES].to_numpy(), expected[SHARES].to_numpy(), rtol=1e-3, atol=1e-4)


def test_the_heads_of_largest_contribution_are_run(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    estimated = measured(model, FITTED, layers=1, exact=0)
    run = measured(model, FITTED, layers=1, exact=2)
    assert set(run.index[run["exact"]]) == set(estimated["contribution"].nlargest(2).index)
    rest = ~run["exact"]
    np.testing.assert_allclose(run.loc[rest, SHARES], estimated.loc[rest, SHARES])
    pairs = measured(model, FITTED, layers=1, exact=[(1, 3), (1, 2)])
    labels = measured(model, FITTED, layers=1, exact=["L1H2", "L1H3"])
    pd.testing.assert_frame_equal(pairs, labels)


# --- the model's state, and refusals ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_in_inference_mode(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    table = measured(model, FITTED)
    with torch.inference_mode():
        pd.testing.assert_frame_equal(measured(model, FITTED), table)


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "one text": (
        (FITTED[:1],),
        {},
        r"tokens must be at least two texts, .* got 1 text: give more, or cut",
    ),
    "one text to measure": ((FITTED, MEASURED[:1]), {}, r"heldout must be at least two texts, .* got 1 text"),
    "longer texts": ((MEASURED, FITTED), {}, r"heldout must be no longer than tokens, 11 tokens, got 12"),
    "unknown head": ((FITTED,), {"exact": ["L9H0"]}, r"exact.*L9H0|exact.*9"),
    "head not chosen": (
        (FITTED,),
        {"layers": 0, "exact": ["L1H0"]},
        r"exact must lie within the chosen heads, got L1",
    ),
    "another word": ((FITTED,), {"exact": "most"}, r"exact given as text must be labels .*most"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_is_needed(case: str, shared_model: Any) -> None:
    arguments, options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        measured(shared_model("bridge", "llama-gqa"), *arguments, **options)


def test_texts_beyond_the_context_are_refused_by_their_name() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=1026).view(2, 513)
    with pytest.raises(ValueError, match=r"^tokens are 513 long, and the model fails beyond its context of 512"):
        where_or_what(model, tokens, layers=0, progress=False)


@pytest.mark.usefixtures("unchecked")
def test_one_long_text_among_short_ones_is_cut(shared_model: Any) -> None:
    """There is no profile for its last distances."""
    ids = torch.nn.functional.pad(MEASURED, (0, 1))
    ids[1, -1] = 5
    mask = torch.nn.functional.pad(torch.ones_like(MEASURED), (0, 1))
    mask[1, -1] = 1
    model, batch = shared_model("bridge", "llama-gqa"), {"input_ids": ids, "attention_mask": mask}
    pd.testing.assert_frame_equal(measured(model, batch), measured(model, MEASURED))


def test_sentences_are_measured_as_they_are() -> None:
    """Strings of any lengths, beside the same ids with a mask."""
    model = load_demo_model()
    sentences = ["We the people of this land.", "Peace.", "The nation must act, and it will act now.", "No one can."]
    tokenizer = model.tokenizer
    padded = tokenizer(sentences, padding=True, return_tensors="pt")
    with_mask = {name: padded[name] for name in ("input_ids", "attention_mask")}
    one, other = (where_or_what(model, x, layers=0, exact=0, progress=False) for x in (sentences, with_mask))
    pd.testing.assert_frame_equal(one, other)
    with pytest.raises(ValueError, match=r'without padding, .*\{"input_ids": ids, "attention_mask": mask\}'):
        where_or_what(model, with_mask["input_ids"], progress=False)


def test_short_texts_are_warned_of() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=32).view(2, 16)
    with pytest.warns(UserWarning, match=r"texts have 16 tokens on average: below about 32 few keys can be wrong"):
        where_or_what(model, tokens, layers=0, exact=0, progress=False)


@pytest.mark.usefixtures("unchecked")
def test_equal_texts_are_warned_of(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for texts in ((torch.cat([MEASURED, MEASURED[:1]]),), (FITTED[:, :11], torch.cat([FITTED[:2, :11], MEASURED[:1]]))):
        with pytest.warns(UserWarning, match=r"2 of [34] measured texts occur more than once among the texts"):
            measured(model, *texts)


@pytest.mark.usefixtures("unchecked")
def test_hooks_of_the_user_are_named(shared_model: Any) -> None:
    """They are in force, and what is said does not hide it."""
    model, point = shared_model("bridge", "llama-gqa"), "blocks.1.attn.hook_z"
    assert "hooks" not in measured(model, FITTED, exact=0).attrs
    with model.hooks(fwd_hooks=[(point, lambda z, hook: 0 * z)]):
        table = measured(model, FITTED, exact=0)
        description = describe_head(model, FITTED, "L1H0", seeds=0, progress=False)
    assert table.attrs["hooks"] == [point]
    assert table.attrs["statement"].endswith(f" are undecided. Measured under hooks of your own at {point}.")
    assert f"Measured under hooks of your own at {point}." in repr(description)
    assert (table[table["layer"] == 1]["verdict"] == "not used").all()


@pytest.mark.usefixtures("unchecked")
def test_models_without_rotation_are_refused(shared_model: Any) -> None:
    with pytest.raises(ValueError, match=r"where_or_what needs rotary .* layer 0 of \w+ has no rotary"):
        measured(shared_model("bridge", "gpt2"), FITTED)


@pytest.mark.usefixtures("unchecked")
def test_layers_without_rotation_have_no_rows(shared_model: Any) -> None:
    model = shared_model("bridge", "smollm3")
    assert measured(model, FITTED)["layer"].tolist() == [0] * 8
    with pytest.raises(ValueError, match=r"layer 1"):
        measured(model, FITTED, layers=1)
