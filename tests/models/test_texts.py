"""Padded batches split into groups of equal length, what is put back, and padding that is refused without a mask."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from tokenizers.processors import TemplateProcessing

import tl_posdisent as tp
from tl_posdisent.models.running.texts import check_tokens, read_texts

LENGTHS = [7, 12, 7, 3]


@pytest.fixture(scope="module")
def demo() -> Any:
    return tp.load_demo_model()


def padded(side: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Ids, mask, and each text alone."""
    texts = [zoo.random_tokens(n, batch=1, seed=n + i)[0] for i, n in enumerate(LENGTHS)]
    ends = [(12 - n, 0) if side == "left" else (0, 12 - n) for n in LENGTHS]
    tokens = torch.stack([torch.nn.functional.pad(x, end, value=pad) for x, end in zip(texts, ends, strict=True)])
    mask = torch.stack([torch.nn.functional.pad(x * 0 + 1, end) for x, end in zip(texts, ends, strict=True)])
    return tokens, mask, texts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_groups_hold_each_text_alone(demo: Any, side: str, dtype: torch.dtype) -> None:
    """Every row in one group, without padding; cut and lay_out are inverse to each other."""
    tokens, mask, texts = padded(side)
    batch = read_texts(demo, tokens, mask.to(dtype))
    assert batch.lengths == LENGTHS
    assert sorted(row for group in batch.groups for row in group.rows.tolist()) == [0, 1, 2, 3]
    for group in batch.groups:
        assert [row.tolist() for row in group.tokens] == [texts[row].tolist() for row in group.rows]
    x = torch.randn(4, 12, 5)
    back = batch.lay_out([group.cut(x) for group in batch.groups])
    assert torch.equal(back[mask.bool()], x[mask.bool()])
    assert bool(back[~mask.bool()].isnan().all())
    answers = torch.randn(4, 3)
    assert torch.equal(batch.lay_out([answers[group.rows] for group in batch.groups]), answers)


def test_what_a_tokenizer_returns_is_ids_with_their_mask(demo: Any) -> None:
    tokens, mask, texts = padded("right")
    batch = read_texts(demo, {"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens * 0})
    assert all(map(torch.equal, batch.unpadded(), texts))
    assert read_texts(demo, {"input_ids": tokens[1:2]}).lengths == [12]
    encoded = demo.tokenizer(["Once upon a time", "One day"], return_tensors="pt", padding=True)
    assert read_texts(demo, encoded).lengths == encoded["attention_mask"].sum(1).tolist()
    with pytest.raises(
        ValueError, match=r"tokens must be a mapping with input_ids, as a tokenizer .*, got one with ids"
    ):
        read_texts(demo, {"ids": tokens})
    with pytest.raises(ValueError, match="attention_mask must be None for tokens with a mask of their own, got both"):
        read_texts(demo, {"input_ids": tokens, "attention_mask": mask}, mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_any_length(side: str) -> None:
    """Strings as the model tokenises each alone, or their ids, padded on the tokenizer's side."""
    model = tp.load_demo_model()
    model.tokenizer.padding_side = side
    texts = ["We the people of the United States", "in order", "to form a more perfect Union"]
    ids = [model.to_tokens(text)[0] for text in texts]
    for given in (texts, ids, [texts[0], *ids[1:]]):
        batch = read_texts(model, given)
        assert all(map(torch.equal, batch.unpadded(), ids))
        assert bool(batch.real[:, -1 if side == "left" else 0].all())
    assert all(map(torch.equal, read_texts(model, [torch.stack([ids[1], ids[1]])]).unpadded(), [ids[1], ids[1]]))


@pytest.mark.parametrize("backend", zoo.KINDS)
@pytest.mark.parametrize("prepends", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_written_bos_is_the_only_one(backend: Any, prepends: bool, adds: bool) -> None:
    """Whether the model's texts begin with one or not, and whether its tokenizer or TransformerLens puts it there."""
    model = tp.load_demo_model(backend=backend)
    bos, number = model.tokenizer.bos_token, model.tokenizer.bos_token_id
    template = {"single": f"{bos} $A", "special_tokens": [(bos, number)]} if adds else {"single": "$A"}
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**template)
    model.cfg.tokenizer_prepends_bos, model.cfg.default_prepend_bos = adds, prepends
    words = "We the people of the United States, in order to form a more perfect Union"
    plain, written = (read_texts(model, text).tokens for text in (words, bos + words))
    assert [plain[0].tolist().count(number), written[0].tolist().count(number)] == [prepends, 1]
    assert torch.equal(written[:, 1:], plain[:, int(prepends) :])
    assert all(map(torch.equal, read_texts(model, [bos + words, words]).unpadded(), [written[0], plain[0]]))
    parts = tp.cut_text(model, bos + words, length=6, texts=2)
    assert int((parts == number).sum()) == (2 if prepends else 1)
    assert bool((parts[:, 0] == number)[: 2 if prepends else 1].all())


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(4, 11), "shape of tokens"),
        (torch.full((4, 12), 0.5), "True or 1"),
        (-torch.ones(4, 12), "True or 1"),
        (torch.tensor([[1.0] * 5 + [0.0] + [1.0] * 6]).expand(4, 12), "gap"),
        (torch.tensor([[0.0] + [1.0] * 5 + [0.0] * 6]).expand(4, 12), "both sides in text 0"),
        (torch.tensor([[1.0] + [0.0] * 11]).expand(4, 12), "at least two tokens of each text"),
        ([1] * 12, "a tensor like tokens"),
        (torch.ones(1, 4), "None for strings and lists"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_masks_that_are_refused(demo: Any, mask: Any, words: str) -> None:
    tokens = "We the people" if words.startswith("None") else padded("right")[0]
    with pytest.raises(ValueError, match=f"attention_mask must .*{words}"):
        read_texts(demo, tokens, mask)


class WithIds:
    """A model whose tokenizer has these ids; no more is asked of it."""

    def __init__(self, model: Any, **ids: int | None) -> None:
        self.model, self.tokenizer = model, SimpleNamespace(**ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("pad", "bos", "eos", "missing", "text"),
    [
        (0, 1, 2, 1, False),  # an id of its own: never text
        (0, 0, 0, 1, True),  # alone it begins or ends the text
        (0, 0, 0, 2, False),
        (0, None, 0, 1, True),
        (None, 0, 0, 2, True),  # nothing pads
    ],
)
def test_padding_without_a_mask(
    side: str, pad: int | None, bos: int | None, eos: int | None, missing: int, text: bool
) -> None:
    """Refused at either side, unless a mask says that it is text: then one warning, since that may be an error."""
    ids = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    model = WithIds(tp.load_demo_model(), **ids)
    tokens = zoo.random_tokens()
    tokens[1, slice(missing) if side == "left" else slice(-missing, None)] = 0
    if text:
        assert torch.equal(check_tokens(model, tokens), tokens)
    else:
        with pytest.raises(ValueError, match=r"tokens must be without padding.*text 1.*\"attention_mask\": mask"):
            check_tokens(model, tokens)
        with pytest.raises(ValueError, match=r"\"attention_mask\": mask"):
            read_texts(model, tokens)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert len(read_texts(model, tokens, torch.ones_like(tokens)).groups) == 1
        read_texts(model, tokens, tokens != 0)
    edge = "beginning" if side == "left" else "end"
    words = [str(x.message).split(" of text")[0] for x in found if "BOS" not in str(x.message)]
    assert words == [f"attention_mask is 1 at the padding id 0 at the {edge}"] * (not text)


def test_a_single_end_is_no_beginning() -> None:
    model = WithIds(tp.load_demo_model(), pad_token_id=0, bos_token_id=1, eos_token_id=0)
    with pytest.raises(ValueError, match="beginning of text 0"):
        check_tokens(model, torch.tensor([[0, 1, 5, 6]]))
    assert check_tokens(model, torch.tensor([[1, 5, 6, 0]])).shape == (1, 4)


def test_the_config_pads_without_a_tokenizer() -> None:
    """A bridge knows the Hugging Face model's padding id."""
    model, tokens = zoo.bridge("llama-gqa"), zoo.random_tokens()
    tokens[0, -3:] = 0
    with pytest.raises(ValueError, match="padding id 0 at the end of text 0"):
        tp.additivity(model, tokens, progress=False)


def test_what_is_no_text_is_named(demo: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens must be texts of at least two tokens, got '' as text 1"):
        read_texts(demo, ["We the people", "", "of this land"])
    with pytest.raises(
        ValueError, match=r"tokens must be text or an integer tensor .*got list: torch.tensor makes one"
    ):
        read_texts(demo, [[1, 2, 3]])
    for wrong in (None, 5):
        message = rf"tokens must be text or an .*, a list of either, or what a tokenizer returns, got {wrong}$"
        with pytest.raises(ValueError, match=message):
            read_texts(demo, wrong)


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_texts_are_their_first_tokens(demo: Any, side: str) -> None:
    tokens, mask, texts = padded(side)
    for found, text in zip(read_texts(demo, tokens, mask).cut(6).unpadded(), texts, strict=True):
        assert found.tolist() == text[:6].tolist()


# --- predictions that count


def listed(texts: Any) -> list[list[bool]]:
    """Which tokens of each text count, without padding."""
    return [row[real].tolist() for row, real in zip(texts.counted, texts.real, strict=True)]


@pytest.mark.parametrize("side", ["left", "right", "list"])
@pytest.mark.parametrize("kind", [int, list, set, tuple, torch.tensor, np.array])
def test_predictions_of_ignored_ids_do_not_count(demo: Any, side: str, kind: Any) -> None:
    """In the batch, in its groups and in parts of it; also of texts that were read before."""
    tokens, mask, texts = padded("right" if side == "list" else side)
    ids = [int(texts[0][2])] if kind is int else [int(text[2]) for text in texts[:3]]
    ignore = ids[0] if kind is int else kind(ids)
    given = (texts, None) if side == "list" else (tokens, mask)
    expected = [[int(x) not in ids for x in text] for text in texts]
    batch = read_texts(demo, *given, ignore=ignore)
    assert listed(batch) == listed(read_texts(demo, read_texts(demo, *given), ignore=ignore)) == expected
    assert not batch.counted[~batch.real].any()
    for group in batch.groups:
        assert group.counted.tolist() == [expected[row] for row in group.rows]
        assert group.predictions.tolist() == [expected[row][:-1] for row in group.rows]
    assert listed(batch.take([2, 0])) == [expected[2], expected[0]]
    assert listed(batch.cut(6)) == [x[:6] for x in expected]
    without = batch.without_first()
    assert listed(without) == [[False, *x[1:]] for x in expected]
    assert listed(read_texts(demo, without, ignore=ids[:1])) == listed(without)
    assert all(map(all, listed(read_texts(demo, *given))))
    assert listed(read_texts(demo, *given, ignore=[])) == listed(read_texts(demo, *given))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_ignored(demo: Any) -> None:
    tokens = torch.tensor([[5, 6, 7, 6], [8, 5, 7, 9]])
    for wrong in (-1, demo.cfg.d_vocab, 1.5, True, "<s>", ["<s>"], torch.tensor([1.0]), [[1]]):
        with pytest.raises(
            ValueError, match=r"ignore must be token ids from 0 to \d+, an integer or several.*to_single_token"
        ):
            read_texts(demo, tokens, ignore=wrong)
    with pytest.raises(ValueError, match=r"ignore must leave a prediction that counts .* in text 1, whose last token"):
        read_texts(demo, tokens, ignore=[5, 7, 8])
    with pytest.raises(ValueError, match="tokens must be texts of at least three tokens"):
        read_texts(demo, tokens[:, :2]).without_first()


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_texts_unlike_those_of_the_training_are_warned_of(backend: Any) -> None:
    """Once a call, of ids and of a string; a model that is loaded for longer texts has a longer context."""
    model, options = tp.load_demo_model(backend=backend, n_ctx=40), {"layers": [0], "heads": [0], "progress": False}
    tokens = tp.cut_text(model, tp.demo_text(), length=40, texts=3)
    with pytest.warns(UserWarning, match=r"^2 of 3 texts do not begin with the BOS token") as caught:
        tp.additivity(model, torch.cat([tokens[:1], tokens[1:].roll(-1, 1)]), **options)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.additivity(model, tokens, **options)
        tp.additivity(model, ["We the people of the United States", "And so it was, in the end"], **options)
        model.cfg.default_prepend_bos = False
        tp.additivity(model, tokens[:, 1:], **options)
    model.cfg.default_prepend_bos = True
    model.cfg.n_ctx = 39
    with pytest.warns(UserWarning, match=r"^the longest text has 40 tokens, and the model a context of 39: ") as caught:
        tp.additivity(model, tokens, **options)
    assert len(caught) == 1
