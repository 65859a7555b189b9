"""Laws of damaged GGUF files: the package's own error, at once, without memory for what the file cannot hold."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent.models.loading.load import load_model

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small model of Llama's architecture."""
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    return path


def test_a_length_beyond_the_file_is_refused_at_once(path: Path) -> None:
    """Of an array and its first string; of the numbers of entries, tensors and dimensions, and of an offset."""
    content, reader = path.read_bytes(), gguf.GGUFReader(path)
    tokens, table = reader.fields["tokenizer.ggml.tokens"], reader.tensors[0].field
    places = [8, 16, *(tokens.offset + sum(part.nbytes for part in tokens.parts[:n]) for n in (4, 5))]
    places += [table.offset + sum(part.nbytes for part in table.parts[:n]) for n in (0, 3, 5)]
    for at in places:
        for number in (2**40, 2**64 - 1):
            path.write_bytes(content[:at] + number.to_bytes(8, "little") + content[at + 8 :])
            assert "must be a whole GGUF file, and cannot be read: " in files.error_of(path), (at, number)


def test_flipped_bits_give_the_package_s_own_error(path: Path) -> None:
    """In the header without the vocabulary, whose strings are most of it; a flip that changes no meaning is read."""
    drawn, pieces, counted = random.Random(0), files.Pieces.of(path), 0
    entries = {key: x for key, x in pieces.entries.items() if len(x) < 200}
    whole = files.Pieces(entries, pieces.table, pieces.n_tensors, pieces.data).joined()
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[drawn.randrange(len(whole) - len(pieces.data))] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        counted += bool(files.error_of(path))
    assert counted > 50


ESCAPE = "\x1b[2J\x07\n\u202e"


def test_strings_of_a_file_reach_no_terminal(path: Path) -> None:
    """Control characters in keys, values, names of tensors and of the architecture are escaped in errors."""
    pieces = files.Pieces.of(path)
    name = ("x" + ESCAPE).encode()
    changes: list[dict[str, Any]] = [
        {"general.architecture": ESCAPE},
        {f"llama.{ESCAPE}": ESCAPE},
        {"llama.rope.scaling.type": ESCAPE},
        {"tokenizer.ggml.bos_token_id": ESCAPE},
    ]
    table = pieces.table + struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, len(pieces.data))
    more = files.Pieces(pieces.entries, table, pieces.n_tensors + 1, pieces.data + bytes(64))
    contents = [*(pieces.joined(x) for x in changes), more.joined()]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot (load|be read)") as caught:
            load_model(path)
        assert str(caught.value).isprintable()


def test_other_orders_of_bytes_and_parts_of_files_are_refused(path: Path) -> None:
    pieces = files.Pieces.of(path)
    whole = pieces.joined()
    for content, words in (
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "its byte order is not this machine's"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1 which we cannot handle"),
        (b"ggml" + whole[4:], "GGUF magic invalid"),
        (pieces.joined({"split.count": 3}), "split.count must be 1, for a whole language model, and is 3"),
        (pieces.joined({"general.type": "adapter"}), "general.type must be 'model'|general.type must be model"),
        (pieces.joined({"general.alignment": 24}), "Invalid alignment: must be a non-zero power of two"),
        (pieces.joined({"gemma3.rope.freq_base": 1e6}), "it states gemma3.rope.freq_base, which is of another arch"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            load_model(path)


def test_a_file_without_a_rotary_base_has_that_of_the_format(tmp_path: Path) -> None:
    """As files of Llama 2, with a warning; those of Gemma 3 always state one."""
    model = files.model_of("llama-gqa")
    files.write_gguf(path := tmp_path / "model.gguf", model, "llama", **{"rope.freq_base": None})
    with pytest.warns(UserWarning, match="llama.rope.freq_base: 10000, the default of the format, is taken"):
        read, _ = files.read_gguf(path, dtype=torch.float32)
    expected = files.with_config(model, rope_parameters=model.config.rope_parameters | {"rope_theta": 10000.0})
    tokens = zoo.random_tokens(40)
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    files.write_gguf(path, files.model_of("gemma3"), "gemma3", **{"rope.freq_base": None})
    with pytest.raises(ValueError, match=r"it does not state gemma3.rope.freq_base, which is needed"):
        files.read_gguf(path, dtype=torch.float32)
