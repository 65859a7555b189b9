"""``where_or_what`` against plain runs with hooks, one head and replacement at a time, and divergences by torch."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    demo_tokens,
    describe_head,
    knock_out,
    load_demo_model,
    remap_distance,
    where_or_what,
)
from tl_posdisent.hooks import applied, substitute_attention

FITTED, MEASURED = zoo.random_tokens(12, 4, seed=1), zoo.random_tokens(11, 3, seed=2)
LENGTHS = (9, 12, 7, 12, 10)
KL_CLOSE = 2e-6  # nats, of divergences by float32 logits, as in test_head_effects.py
SHARES = ["kept_distance", "kept_content", "kept_uniform", "gate", "contribution"]
KEPT = SHARES[:-1]
SHOWS_A_COPY = ("gptj", "deepseek_v2", "deepseek_v3", "gemma4")
"""Architectures whose pattern a plain hook cannot change."""
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))


def measured(model: Any, *texts: Any, **options: Any) -> pd.DataFrame:
    return where_or_what(model, *texts, **{"progress": False, "draws": 1, "exact": 1} | options)


def divergence(model: Any, text: Tensor, hooks: Any) -> float:
    """KL(unmodified ‖ under hooks) of a text, nats per prediction; that at the first token is not counted."""
    with torch.no_grad():
        clean = model(text[None])[0, 1:-1].double().log_softmax(-1)
        with model.hooks(fwd_hooks=hooks):
            changed = model(text[None])[0, 1:-1].double().log_softmax(-1)
    return float(torch.nn.functional.kl_div(changed, clean, log_target=True, reduction="sum")) / len(clean)


def mean_output(model: Any, fitted: Any, layer: int, head: int) -> list[Any]:
    """Replace a head's z by its mean over fitted texts, both but for first tokens."""
    name = f"blocks.{layer}.attn.hook_z"
    texts = [text[None] for text in (fitted if isinstance(fitted, Tensor) else fitted["input_ids"])]

    def of_head(z: Tensor) -> Tensor:
        """A view of the head's part; TransformerLens splits latent attention by another size."""
        return z.view(*z.shape[:2], model.cfg.n_heads, -1)[:, 1:, head]

    with torch.no_grad():
        z = [of_head(model.run_with_cache(text, names_filter=name)[1][name])[0].double() for text in texts]
    mean = torch.cat(z).mean(0)

    def replace(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        of_head(z)[:] = mean.to(z)
        return z

    return [(name, replace)]


def gate(layer: int, head: int) -> list[Any]:
    """Spread attention evenly over all keys but the first, which keeps its own."""

    def replace(pattern: Tensor, hook: Any) -> Tensor:
        pattern = pattern.clone()
        rows = pattern[:, head]
        others = rows > 0
        others[..., 0] = False
        even = rows.masked_fill(~others, 0).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)
        pattern[:, head] = torch.where(others, even, rows)
        return pattern

    return [(f"blocks.{layer}.attn.hook_pattern", replace)]


def own_apart(distance: float, distances: Tensor) -> Tensor:
    """Put every key at one distance but the query's own."""
    return torch.where(distances == 0, 0.0, distance)


def plain_row(model: Any, fitted: Any, texts: list[Tensor], layer: int, head: int) -> dict[str, float]:
    """Return one row of the table by one run for each replacement and text; the constants are chosen by loops."""
    one: dict[str, Any] = {"layers": layer, "heads": [head]}
    mean = mean_output(model, fitted, layer, head)
    distance = substitute_attention(model, "distance+sink", fitted_to=fitted, **one)
    uniform = substitute_attention(model, "uniform", **one)
    constants = [remap_distance(model, partial(own_apart, d), **one) for d in (1, 5, 32)]
    replaced = (mean, distance, uniform, gate(layer, head), *constants)
    k = np.array([[divergence(model, text, hooks) for text in texts] for hooks in replaced])
    n = np.array([len(text) - 2 for text in texts])
    of_constant = k[4:] * n
    chosen = [of_constant[np.argmin(of_constant.sum(1) - of_constant[:, t]), t] for t in range(len(texts))]
    contributed = k[0] @ n
    return {
        "kept_distance": 1 - k[1] @ n / contributed,
        "kept_uniform": 1 - k[2] @ n / contributed,
        "gate": 1 - k[3] @ n / contributed,
        "kept_content": 1 - sum(chosen) / contributed,
        "contribution": contributed / n.sum(),
        "content_distance": (1, 5, 32)[int(np.argmin(of_constant.sum(1)))],
    }


def same_as_plain(model: Any, table: pd.DataFrame, fitted: Any, texts: list[Tensor], name: str) -> None:
    """Compare rows; the gate where the pattern that the model shows is the one that it uses."""
    compared = [x for x in KEPT if x != "gate" or name not in SHOWS_A_COPY]
    for row in table.to_dict("records"):
        expected = plain_row(model, fitted, texts, row["layer"], row["head"])
        assert row["contribution"] == pytest.approx(expected["contribution"], abs=KL_CLOSE)
        for column in compared:
            close = 2 * KL_CLOSE / expected["contribution"] * (1 + abs(expected[column]))
            assert row[column] == pytest.approx(expected[column], abs=close)
        assert row["content_distance"] == expected["content_distance"]


# --- exact rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    zoo.cases("llama-gqa", "gptj", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v2", "falcon", "gemma4"),
)
def test_exact_rows_are_those_of_plain_runs(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = measured(model, FITTED, MEASURED, exact=["L0H1", "L1H6"])
    run = table[table["measured"] == "run"]
    assert run[["layer", "head"]].to_numpy().tolist() == [[0, 1], [1, 6]]
    same_as_plain(model, run, FITTED, list(MEASURED), name)
    assert (run["contribution"] > 100 * KL_CLOSE).all()
    assert run["kept_distance"].sub(run["kept_content"]).abs().max() > 0.01


@pytest.mark.slow
@FEW
def test_each_half_is_measured_with_fits_to_the_other(kind: str, name: str, shared_model: Any) -> None:
    """Losses add up over the halves; the constants are chosen in all other texts."""
    model, texts = shared_model(kind, name), torch.cat([FITTED, FITTED.flip(1)])
    some: dict[str, Any] = {"heads": [1, 6], "exact": "all"}
    whole = measured(model, texts, **some)
    halves = [measured(model, texts[1::2], texts[::2], **some), measured(model, texts[::2], texts[1::2], **some)]
    contributed = sum(x["contribution"] for x in halves) / 2
    lost = sum((1 - x["kept_distance"]) * x["contribution"] for x in halves) / 2
    assert whole["contribution"].tolist() == pytest.approx(contributed.tolist(), rel=1e-5, abs=KL_CLOSE)
    assert whole["kept_distance"].tolist() == pytest.approx((1 - lost / contributed).tolist(), abs=1e-3)


@FEW
@pytest.mark.parametrize("side", ["left", *slow(["right"])])
def test_padding_changes_nothing(kind: str, name: str, side: str, shared_model: Any) -> None:
    """Of fitted and measured texts of unequal lengths; each text is run alone by the plain loops."""
    model, texts = shared_model(kind, name), [zoo.random_tokens(n, 1, seed=n + i)[0] for i, n in enumerate(LENGTHS)]
    pad = [((12 - len(x), 0) if side == "left" else (0, 12 - len(x)), x) for x in texts]
    ids = torch.stack([torch.nn.functional.pad(x, ends) for ends, x in pad])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(x), ends) for ends, x in pad])
    table = measured(model, FITTED, {"input_ids": ids, "attention_mask": mask}, exact=["L1H3"])
    same_as_plain(model, table[table["measured"] == "run"], FITTED, texts, name)
    some: dict[str, Any] = {"heads": [3, 6]}
    swapped = measured(model, {"input_ids": ids, "attention_mask": mask}, MEASURED, **some)
    backwards = measured(model, {"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}, MEASURED, **some)
    assert swapped["kept_distance"].tolist() == pytest.approx(backwards["kept_distance"].tolist(), abs=1e-3)


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
    tables = [measured(model, texts, exact=exact, draws=16) for exact in (0, "all")]
    estimated, run = (table.iloc[0] for table in tables)
    assert estimated["contribution"] < 0.1 * run["contribution"]
    times = re.search(r"The contribution of L0H0 is (\d+) times its estimate", tables[1].attrs["statement"])
    assert times is not None
    assert int(times[1]) == pytest.approx(run["contribution"] / estimated["contribution"], abs=0.51)
    assert "its estimate" not in tables[0].attrs["statement"]
    assert run["kept_uniform"] > 0.95
    assert estimated["kept_uniform"] < 0.8
    assert min(estimated["kept_distance"], run["kept_distance"]) > 0.99


# --- the table --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return measured(zoo.load("bridge", "llama-gqa"), FITTED, exact=3)


def test_rows_columns_and_attributes(table: pd.DataFrame) -> None:
    numbers = ["contribution", "joint", "difference", "kept_distance", "kept_content", "kept_uniform", "gate"]
    columns = [column for name in numbers for column in (name, f"{name}_se")]
    columns += ["content_distance", "q", "measured", "open", "where_part_se", "what_part_se", "neither_part_se"]
    assert list(table) == ["layer", "head", *columns, "neither_part", "where_part", "what_part", "verdict"]
    assert [name for name in table if hasattr(pd.DataFrame, str(name))] == ["head"]
    assert table[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in (0, 1) for head in range(8)]
    assert table["measured"].value_counts().to_dict() == {"estimated": 13, "run": 3}
    assert set(table["content_distance"]) <= {1, 5, 32}
    assert table[["where_part", "what_part", "neither_part"]].sum(axis=1).tolist() == pytest.approx([1] * 16)
    assert table.attrs["passes"] > 4


def test_the_table_says_what_it_holds_before_its_rows(table: pd.DataFrame) -> None:
    """Parts of the sum, the verdicts and the heads that contribute most, computed from the rows."""
    statement, total = table.attrs["statement"], table["contribution"].sum()
    assert table.attrs["answer"] == re.sub(r" Heads \(share of the sum\): [^.]*\.", "", statement)
    assert statement.startswith("Of what 16 heads contribute in 4 texts of 12 tokens, each alone, ")
    for part, words in (
        ("where", "depends on where keys are"),
        ("what", "on what they are"),
        ("neither", "on neither"),
    ):
        share = 100 * (table["contribution"] * table[f"{part}_part"]).sum() / total
        found = re.search(rf"([\d.]+) ± [\d.]+ % {words}", statement)
        assert found is not None
        assert float(found[1]) == pytest.approx(share, abs=0.51)
    by_runs = 100 * table.loc[table["measured"] == "run", "contribution"].sum() / total
    assert f"({by_runs:.0f} % of it measured by runs)" in statement
    for verdict, rows in table.groupby("verdict"):
        share = 100 * rows["contribution"].sum() / total
        said = f"{verdict} {len(rows)}" + ("" if verdict == "not used" else f" ({share:.0f} %)")
        assert said in statement
        largest = rows.nlargest(3, "contribution")
        names = ", ".join(f"L{x}H{y}" for x, y in zip(largest["layer"], largest["head"], strict=True))
        assert names in repr(table)
        assert names in table._repr_html_()
    assert repr(table).startswith(statement)
    assert f"<p>{statement.replace(' %', '&nbsp;%')}</p>" in table._repr_html_()
    assert type(table[table["verdict"] == "what"]) is type(table.copy()) is pd.DataFrame
    without = type(table)(table.drop(columns="verdict"))
    without.attrs = table.attrs
    assert repr(without) == repr(pd.DataFrame(without))
    assert without._repr_html_() == pd.DataFrame(without)._repr_html_()


def test_groups_are_replaced_together(shared_model: Any) -> None:
    """Each row against plain runs with all of its heads replaced; one head alone is a group of one."""
    model = shared_model("bridge", "llama-gqa")
    groups = {"two": ["L0H1", (1, 6)], "one": ["L1H6"], "layer": [(0, 2), (0, 3)]}
    table = measured(model, FITTED, MEASURED, groups=groups)
    assert table["group"].tolist() == ["two", "one", "layer"]
    assert table["heads"].tolist() == ["L0H1, L1H6", "L1H6", "L0H2, L0H3"]
    alone = measured(model, FITTED, MEASURED, layers=1, heads=[6], exact="all")
    np.testing.assert_allclose(table.loc[1, SHARES].astype(float), alone.loc[0, SHARES].astype(float), rtol=1e-5)
    for name, heads in (("two", [(0, 1), (1, 6)]), ("layer", [(0, 2), (0, 3)])):
        hooks = {
            "mean": [hook for head in heads for hook in mean_output(model, FITTED, *head)],
            "kept_distance": substitute_attention(model, "distance+sink", fitted_to=FITTED, heads=heads),
            "kept_uniform": substitute_attention(model, "uniform", heads=heads),
            "gate": [hook for head in heads for hook in gate(*head)],
        }
        k = {key: sum(divergence(model, text, some) for text in MEASURED) / 3 for key, some in hooks.items()}
        (row,) = table[table["group"] == name].to_dict("records")
        assert row["contribution"] == pytest.approx(k["mean"], abs=KL_CLOSE)
        for key in ("kept_distance", "kept_uniform", "gate"):
            expected = 1 - k[key] / k["mean"]
            assert row[key] == pytest.approx(expected, abs=2 * KL_CLOSE / k["mean"] * (1 + abs(expected)))
    assert "two (L0H1, L1H6) contributes" in table.attrs["statement"]


def test_tokens_to_ignore_are_not_counted(shared_model: Any) -> None:
    """Of runs: the divergences of the other predictions, averaged."""
    model, ignored = shared_model("bridge", "llama-gqa"), MEASURED[:, 4].unique().tolist()
    table = measured(model, FITTED, MEASURED, layers=1, heads=[6], exact="all", ignore=ignored)
    hooks = substitute_attention(model, "uniform", layers=1, heads=[6])
    kept = (~torch.isin(MEASURED, torch.tensor(ignored)))[:, 1:-1]
    fitted = (~torch.isin(FITTED, torch.tensor(ignored)))[:, 1:]
    k = []
    name = "blocks.1.attn.hook_z"
    with torch.no_grad():
        z = model.run_with_cache(FITTED, names_filter=name)[1][name][:, 1:, 6][fitted].double().mean(0)

        def replace(x: Tensor, hook: Any) -> Tensor:
            x = x.clone()
            x[:, 1:, 6] = z.to(x)
            return x

        clean = model(MEASURED)[:, 1:-1].double().log_softmax(-1)
        for some in ([(name, replace)], hooks):
            with model.hooks(fwd_hooks=some):
                changed = model(MEASURED)[:, 1:-1].double().log_softmax(-1)
            k.append((clean.exp() * (clean - changed)).sum(-1)[kept].mean().item())
    assert table["contribution"].item() == pytest.approx(k[0], abs=KL_CLOSE)
    assert table["kept_uniform"].item() == pytest.approx(1 - k[1] / k[0], abs=4 * KL_CLOSE / k[0])


@pytest.mark.slow
def test_some_heads_have_the_rows_that_they_have_among_all(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    whole = measured(model, FITTED, heads=[2, 5, 6], exact="all")
    some = measured(model, FITTED, layers=1, heads=[2, 5], exact="all")
    assert some[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 5]]
    expected = whole[(whole["layer"] == 1) & whole["head"].isin([2, 5])]
    np.testing.assert_allclose(some[SHARES].to_numpy(), expected[SHARES].to_numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_heads_of_largest_contribution_are_run(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    estimated = measured(model, FITTED, layers=1, exact=0)
    run = measured(model, FITTED, layers=1, exact=2)
    rest = run["measured"] == "estimated"
    assert set(run.index[~rest]) == set(estimated["contribution"].nlargest(2).index)
    np.testing.assert_allclose(run.loc[rest, KEPT], estimated.loc[rest, KEPT])
    ratios = run.loc[rest, "contribution"] / estimated.loc[rest, "contribution"]
    assert ratios.tolist() == pytest.approx([ratios.iloc[0]] * 6)  # those that were run correct the others
    half = measured(model, FITTED, layers=1, exact="half")
    share = estimated["contribution"].sort_values(ascending=False).cumsum() / estimated["contribution"].sum()
    assert (half["measured"] == "run").sum() == (share < 0.5).sum() + 1  # all in one layer
    pairs, labels = (
        measured(model, FITTED, layers=1, heads=[2, 3, 5], exact=exact)
        for exact in ([(1, 3), (1, 2)], ["L1H2", "L1H3"])
    )
    pd.testing.assert_frame_equal(pairs, labels)


# --- the model's state, and refusals ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_in_inference_mode(shared_model: Any) -> None:
    model, one = shared_model("bridge", "llama-gqa"), {"layers": 1, "heads": [2]}
    table = measured(model, FITTED, **one)
    with torch.inference_mode():
        pd.testing.assert_frame_equal(measured(model, FITTED, **one), table)


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "one text": (
        (FITTED[:1],),
        {},
        r"tokens must be at least two texts, .* got 1 text: give more, or parts of one",
    ),
    "one text to measure": ((FITTED, MEASURED[:1]), {}, r"heldout must be at least two texts, .* got 1 text"),
    "longer texts": ((MEASURED, FITTED), {}, r"heldout must be no longer than tokens, 11 tokens, got 12"),
    "unknown head": ((FITTED,), {"exact": ["L9H0"]}, r"exact.*L9H0|exact.*9"),
    "head not chosen": (
        (FITTED,),
        {"layers": 0, "exact": ["L1H0"]},
        r"exact must lie within the chosen heads, got L1",
    ),
    "groups and layers": (
        (FITTED,),
        {"groups": {"a": ["L0H1"]}, "layers": 0},
        r"groups must be given without layers and heads",
    ),
    "groups of nothing": ((FITTED,), {"groups": {}}, r"groups must be heads by the name of a group, such as"),
    "groups without names": ((FITTED,), {"groups": ["L0H1"]}, r"groups must be heads by the name of a group"),
    "group of unknown heads": ((FITTED,), {"groups": {"a": ["L9H0"]}}, r"groups.*9"),
    "another word": (
        (FITTED,),
        {"exact": "most"},
        "^exact must be 'half', 'all', a number of heads, or heads .*'most'",
    ),
    "no heads": ((FITTED,), {"exact": None}, "^exact must be 'half', 'all', .* got None"),
    "half a head": ((FITTED,), {"exact": 2.5}, r"^exact must be 'half', 'all', .* got 2\.5"),
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


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_one_long_text_among_short_ones_is_cut(shared_model: Any) -> None:
    """There is no profile for its last distances."""
    ids = torch.nn.functional.pad(MEASURED, (0, 1))
    ids[1, -1] = 5
    mask = torch.nn.functional.pad(torch.ones_like(MEASURED), (0, 1))
    mask[1, -1] = 1
    model, batch = shared_model("bridge", "llama-gqa"), {"input_ids": ids, "attention_mask": mask}
    found, expected = (measured(model, texts, layers=1, heads=[3]) for texts in (batch, MEASURED))
    pd.testing.assert_frame_equal(found, expected)


def test_sentences_are_measured_as_they_are() -> None:
    """Strings of any lengths, beside the same ids with a mask."""
    model = load_demo_model()
    sentences = ["We the people of this land.", "Peace.", "The nation must act, and it will act now.", "No one can."]
    tokenizer = model.tokenizer
    padded = tokenizer(sentences, padding=True, return_tensors="pt")
    with_mask = {name: padded[name] for name in ("input_ids", "attention_mask")}
    one, other = (where_or_what(model, x, heads="L0H5", exact=0, progress=False) for x in (sentences, with_mask))
    pd.testing.assert_frame_equal(one, other)
    with pytest.raises(ValueError, match=r'without padding, .*\{"input_ids": ids, "attention_mask": mask\}'):
        where_or_what(model, with_mask["input_ids"], progress=False)


def test_short_texts_are_warned_of() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=32).view(2, 16)
    with pytest.warns(UserWarning, match=r"texts have 16 tokens on average: below about 32 few keys can be wrong"):
        where_or_what(model, tokens, heads="L0H5", exact=0, progress=False)


@pytest.mark.usefixtures("unchecked")
def test_equal_texts_are_warned_of(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for texts in ((torch.cat([MEASURED, MEASURED[:1]]),), (FITTED[:, :11], torch.cat([FITTED[:2, :11], MEASURED[:1]]))):
        with pytest.warns(UserWarning, match=r"2 of [34] measured texts occur more than once among the texts"):
            table = measured(model, *texts, layers=1, heads=[0], exact=0)
        assert table.attrs["statement"].startswith("Of what 1 head contributes in ")


@pytest.mark.usefixtures("unchecked")
def test_hooks_of_the_user_are_named(shared_model: Any) -> None:
    """They are in force, and what is said does not hide it."""
    model, point = shared_model("bridge", "llama-gqa"), "blocks.1.attn.hook_z"
    some: dict[str, Any] = {"heads": [0, 3], "exact": 0}
    assert "hooks" not in measured(model, FITTED, **some).attrs
    with model.hooks(fwd_hooks=[(point, lambda z, hook: 0 * z)]):
        table = measured(model, FITTED, **some)
        description = describe_head(model, FITTED, "L1H0", seeds=0, progress=False)
    assert table.attrs["hooks"] == [point]
    assert table.attrs["statement"].endswith(f" Measured under hooks of your own at {point}.")
    assert f"Measured under hooks of your own at {point}." in repr(description)
    assert (table[table["layer"] == 1]["verdict"] == "not used").all()


@pytest.mark.usefixtures("unchecked")
@FEW
def test_hooks_of_this_package_on_measured_heads_are_refused(kind: str, name: str, shared_model: Any) -> None:
    """Of any kind, also by ``applied``; other heads can be measured under them."""
    model = shared_model(kind, name)
    lists = [
        remap_distance(model, partial(torch.clamp, max=3), heads="L0H2"),
        substitute_attention(model, "uniform", heads="L0H2"),
    ]
    lists += [ablate_heads(model, ["L0H2"]), knock_out(model, keys=[1], heads="L0H2")]
    words = r"^model must not have hooks of this package .* change L0H2: remove them, or measure other heads"
    for hooks in lists:
        for by_applied in (False, True):
            with applied(model, hooks) if by_applied else model.hooks(fwd_hooks=hooks):
                with pytest.raises(ValueError, match=words):
                    measured(model, FITTED)
                with pytest.raises(ValueError, match=words):
                    measured(model, FITTED, groups={"some": ["L1H1", "L0H2"]})
                with pytest.raises(ValueError, match=words):
                    describe_head(model, FITTED, "L0H2", progress=False)
                if by_applied:
                    assert len(measured(model, FITTED, layers=1, heads=[2], exact=0)) == 1
    assert len(measured(model, FITTED, heads=[2], exact=0)) == 2


@pytest.mark.usefixtures("unchecked")
def test_models_without_rotation_are_refused(shared_model: Any) -> None:
    with pytest.raises(ValueError, match=r"where_or_what needs rotary .* layer 0 of \w+ has no rotary"):
        measured(shared_model("bridge", "gpt2"), FITTED)


@pytest.mark.usefixtures("unchecked")
def test_layers_without_rotation_have_no_rows(shared_model: Any) -> None:
    model = shared_model("bridge", "smollm3")
    assert measured(model, FITTED, exact=0)["layer"].tolist() == [0] * 8
    with pytest.raises(ValueError, match=r"layer 1"):
        measured(model, FITTED, layers=1)
