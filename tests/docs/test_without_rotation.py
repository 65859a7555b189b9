"""The studies of models without rotation: their losses against models that have no positions, and their choices."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pandas as pd
import pytest
import torch
from support.pages import ROOT
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import tl_posdisent as tp
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.experiments import needle_texts

FIGURES = ROOT / "docs" / "figures"
LAYERS, TEXTS = 8, 2
SIZE = {"vocab_size": 1100, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4}
SIZE |= {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script, with the demo text in place of speeches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIGURES))
        import without_rotation

        patch.setattr(without_rotation, "COPY", 12)
        patch.setattr(without_rotation, "speeches", parts)
        yield without_rotation


def parts(model: Any, n: int, length: int, skip: int = 0) -> Tensor:
    ids = model.to_tokens(tp.demo_text(), truncate=False)[0]
    return torch.stack([torch.cat([ids[:1], ids[1 + 64 * x : length + 64 * x]]) for x in range(skip, skip + n)])


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **SIZE)).eval()


@pytest.fixture(scope="module")
def model(plain: LlamaForCausalLM) -> Any:
    return tp.bridge_from_hf(deepcopy(plain), tokenizer=demo_tokenizer())


@pytest.fixture(scope="module")
def table(script: Any, model: Any) -> pd.DataFrame:
    options = {"texts": TEXTS, "draws": 2, "length": 32, "edges": (1, 32, 48), "global_layers": [3, 7]}
    return script.without_rotation(model, **options)


def hybrid(plain: LlamaForCausalLM, layers: list[int]) -> SmolLM3ForCausalLM:
    """transformers' own model without positions in some layers, with the same weights."""
    rotated = [int(layer not in layers) for layer in range(LAYERS)]
    config = SmolLM3Config(no_rope_layers=rotated, rope_parameters=plain.config.rope_parameters, **SIZE)
    config.tie_word_embeddings = plain.config.tie_word_embeddings
    found = SmolLM3ForCausalLM(config).eval()
    found.load_state_dict(plain.state_dict())
    return found


def added(plain: LlamaForCausalLM, layers: list[int], tokens: Tensor, first: int) -> Tensor:
    """``[text]``: loss from a position on of the model without positions in some layers, minus its own."""
    found = []
    for each in (hybrid(plain, layers), plain):
        with torch.no_grad():
            logits = each(tokens).logits[:, first - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, first:].flatten(), reduction="none")
        found.append(loss.view(len(tokens), -1).mean(1))
    return found[0] - found[1]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("all layers", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("every fourth layer", [3, 7]),
        ("global layers", [3, 7]),
    ],
)
def test_added_losses_are_those_of_a_model_that_has_no_positions_there(
    script: Any, plain: LlamaForCausalLM, model: Any, table: pd.DataFrame, name: str, layers: list[int]
) -> None:
    rows = table[table["change"] == name].set_index("measure")
    assert set(rows["where"]) == {" ".join(map(str, layers))}
    texts = {"prose": (parts(model, TEXTS, 32), 1), "second copy": (script.copies(model, TEXTS), 14)}
    for measure, (tokens, first) in texts.items():
        expected = added(plain, layers, tokens, first)
        assert rows.loc[measure, "value"] == pytest.approx(expected.mean().item(), abs=1e-4)
        assert rows.loc[measure, "se"] == pytest.approx((expected[0] - expected[1]).abs().item() / 2, abs=1e-4)


def test_the_second_copy_begins_where_it_can_be_copied(script: Any, model: Any) -> None:
    tokens = script.copies(model, 2)
    torch.testing.assert_close(tokens[:, 1:13], tokens[:, 13:])
    assert tokens.shape == (2, 25)  # the token at 14 is the second of the copy


def test_every_fourth_layer_is_that_of_smollm3(script: Any) -> None:
    (found,) = (x for x in script.by_layers(tp.load_demo_model(), 4, 0, []) if x.name == "every fourth layer")
    rotated = SmolLM3Config(num_hidden_layers=5).no_rope_layers
    assert found.where == " ".join(str(layer) for layer, rotates in enumerate(rotated) if not rotates)


def test_loss_by_position_adds_up_to_the_loss(plain: LlamaForCausalLM, model: Any, table: pd.DataFrame) -> None:
    tokens = parts(model, TEXTS, 48)
    rows = table[table["change"].eq("all layers") & table["measure"].eq("prose by position")]
    rows = rows.set_index("positions")["value"]
    whole = added(plain, list(range(LAYERS)), tokens, 1).mean().item()
    assert rows["1 to 32"] * 31 + rows["32 to 48"] * 16 == pytest.approx(47 * whole, abs=1e-3)


def test_random_layers_and_heads_are_as_many_and_others(table: pd.DataFrame) -> None:
    drawn = table[table["measure"].eq("prose") & table["draw"].notna()].groupby("change")["where"].agg(list)
    sizes = {"random fourth": 2, "random local layers": 2}
    for name, size in sizes.items():
        assert {len(where.split()) for where in drawn[name]} == {size}
        assert len(drawn[name]) == (4 if name == "random local layers" else 2)
        assert len(set(drawn[name])) > 1
    assert all(not {"3", "7"} & set(where.split()) for where in drawn["random local layers"])
    for label in ("previous_token", "induction"):
        (chosen,) = table[table["change"].eq(f"heads, most {label}") & table["measure"].eq("prose")]["where"]
        for where in drawn[f"random heads of the layers with most {label}"]:
            assert len(where.split()) == len(chosen.split())
            assert not set(where.split()) & set(chosen.split())
            assert {x.split("H")[0] for x in where.split()} <= {x.split("H")[0] for x in chosen.split()}


def test_distances_are_those_of_a_table_of_them(script: Any, model: Any, table: pd.DataFrame) -> None:
    tokens = parts(model, TEXTS, 32)
    hooks = tp.remap_distance(model, (torch.arange(32)[:, None] - torch.arange(32) + 4).double())
    rows = table[table["change"].eq("distances plus 4") & table["measure"].eq("prose")]
    expected = (script.losses(model, tokens, hooks) - script.losses(model, tokens)).mean().item()
    assert rows["value"].item() == pytest.approx(expected, abs=1e-4)


def test_shuffled_texts_keep_their_first_and_last_tokens(script: Any) -> None:
    tokens = torch.arange(40).view(2, 20)
    for kept in (1, 5):
        found = script.shuffled(tokens, kept, 0)
        torch.testing.assert_close(found[:, :1], tokens[:, :1])
        torch.testing.assert_close(found[:, -kept:], tokens[:, -kept:])
        torch.testing.assert_close(found.sort(1).values, tokens)
        assert (found != tokens).sum() > 20


def test_word_order_without_attention_to_other_tokens_is_of_no_use(script: Any, model: Any) -> None:
    """Where attention returns nothing, the next token depends on the last one alone."""
    with model.hooks(fwd_hooks=tp.ablate_heads(model, None)):
        table = script.word_order(model, texts=2, orders=1, length=32, kept=(1, 4))
    assert table.query("change == 'unchanged' and measure != 'loss'")["value"].abs().max() < 1e-5


def test_word_order_is_that_of_a_loop(script: Any, plain: LlamaForCausalLM, model: Any) -> None:
    table = script.word_order(model, texts=2, orders=2, length=32, kept=(1, 4)).set_index(["change", "measure"])
    tokens, bare = parts(model, 2, 32), hybrid(plain, list(range(LAYERS)))
    differences = []
    for at in torch.linspace(8, 30, 8).long().tolist():
        for seed in range(2):
            some = script.shuffled(tokens[:, : at + 1], 4, seed)
            with torch.no_grad():
                before, now = (bare(x).logits[:, -1].log_softmax(-1) for x in (tokens[:, : at + 1], some))
            targets = tokens[:, at + 1, None]
            differences.append((before - now).gather(1, targets)[:, 0])
    expected = torch.stack(differences).mean(0)
    found = table.loc[("all layers", "added by shuffling all but the last 4")]
    assert found["value"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert found["se"] == pytest.approx((expected[0] - expected[1]).abs().item() / 2, abs=1e-4)


def test_needles_are_compared_by_the_logits_of_a_model_without_positions(
    script: Any, plain: LlamaForCausalLM, model: Any
) -> None:
    table = script.needles(model, (160, 192), pairs=3, draws=1, global_layers=[3, 7])
    given, bare = needle_texts(model, length=192, pairs=3, seed=2), hybrid(plain, [3, 7])
    everywhere, other, absent = set(given.words.flatten().tolist()), [], []
    for tokens, (answer, decoy) in zip(given.tokens, given.words.tolist(), strict=True):
        with torch.no_grad():
            logits = bare(tokens[None]).logits[0, -1]
        other.append((logits[answer] - logits[decoy]).item())
        absent.append((logits[answer] - logits[[*everywhere - {answer, decoy}]].mean()).item())
    measures = {"answer minus other": other, "answer over other": [float(x > 0) for x in other]}
    rows = table[table["change"].eq("global layers") & table["positions"].eq("192 tokens")].set_index("measure")
    for measure, values in (measures | {"answer minus absent": absent}).items():
        of_pairs = torch.tensor(values, dtype=torch.float64).view(3, 2).mean(1)
        assert rows.loc[measure, "value"] == pytest.approx(of_pairs.mean().item(), abs=1e-4)
        assert rows.loc[measure, "se"] == pytest.approx(of_pairs.std().item() / 3**0.5, abs=1e-4)
        assert rows.loc[measure, "pairs"] == 3
    longer = set(table[table["positions"] == "192 tokens"]["change"])
    assert longer < set(table[table["positions"] == "160 tokens"]["change"])
