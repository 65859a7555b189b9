"""Laws of damaged GGUF files: the package's own error, at once, without memory for what the file cannot hold."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent.models.loading.load import load_model

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")


@pytest.fixture(params=["llama-gqa", "gemma3"])
def pieces(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    files.write_gguf(path := tmp_path / "model.gguf", files.model_of(request.param), files.MODELS[request.param][0])
    return files.Pieces.of(path)


def refused(path: Path, content: bytes) -> str:
    """The error of a file with this content, or nothing where it is read."""
    path.write_bytes(content)
    message: str = files.error_of(path)
    assert message.isprintable()
    assert not message or str(path) in message
    return message


def test_arrays_are_read_as_by_the_package_gguf(tmp_path: Path) -> None:
    """Arrays of numbers, which are read at once instead of number by number."""
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    given = {
        "a.list": [1.5, 2.5],
        "an.empty": [],
        "a.nested": [[1, 2], [3, 4]],
        "a.truth": [True, False],
        "a.small": -3,
    }
    path.write_bytes(files.Pieces.of(path).joined(given))
    expected = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert files.read_gguf_file(path).metadata == expected
    assert expected["a.list"] == [1.5, 2.5]


def test_a_length_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    """Of an array of numbers, of strings, and of one string; of the numbers of entries, tensors and dimensions."""
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    content, reader = path.read_bytes(), gguf.GGUFReader(path)
    arrays = [f for f in reader.fields.values() if f.types[:1] == [gguf.GGUFValueType.ARRAY]]
    strings = [f for f in arrays if f.types[1] == gguf.GGUFValueType.STRING]
    assert {f.types[1] for f in arrays} > {gguf.GGUFValueType.STRING}
    places = [f.offset + sum(part.nbytes for part in f.parts[:4]) for f in arrays]  # of the number of elements
    places += [f.offset + sum(part.nbytes for part in f.parts[:5]) for f in strings]  # of the first string's bytes
    places += [8, 16, reader.tensors[0].field.offset]
    table = [tensor.field for tensor in reader.tensors[:3]]
    places += [f.offset + sum(part.nbytes for part in f.parts[:3]) for f in table]  # of a dimension
    places += [f.offset + sum(part.nbytes for part in f.parts[:5]) for f in table]  # of an offset
    for at in places:
        for number in (2**31, 2**40, 2**63 - 1, 2**64 - 1):
            damaged = content[:at] + number.to_bytes(8, "little") + content[at + 8 :]
            message = refused(path, damaged)
            assert "must be a whole GGUF file, and cannot be read: " in message, (at, number)


def test_sizes_are_compared_with_the_tensors_before_anything_is_built(pieces: Any, tmp_path: Path) -> None:
    """Each number of the metadata, made as large as its type allows: refused, or of no cost."""
    name = "llama" if "llama.block_count" in pieces.entries else "gemma3"
    keys = [
        key
        for key in pieces.entries
        if key.startswith(f"{name}.") and not key.endswith(("epsilon", "freq_base", "factor"))
    ]
    refused(tmp_path / "model.gguf", pieces.joined())  # so that all modules are imported
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in keys:
        for value in (2**31 - 1, 2**31, 2**32 - 1, 2**63, 0, -1):
            message = refused(tmp_path / "model.gguf", pieces.joined({key: value}))
            free = key.endswith(("context_length", "sliding_window")) and value == 2**31 - 1
            assert free or key in message, (key, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; one head of 2³¹ is 8 GB


def test_files_cut_short_or_with_flipped_bits_give_the_package_s_own_error(pieces: Any, tmp_path: Path) -> None:
    """Outside of the vocabulary, whose strings are most of the header; a flip that changes no meaning is read."""
    drawn, path, whole = random.Random(0), tmp_path / "model.gguf", pieces.joined()
    counted = 0
    for _ in range(40):
        message = refused(path, whole[: drawn.randrange(len(whole))])
        assert "must be a whole GGUF file, and cannot be read: " in message
    short = files.Pieces(
        {key: x for key, x in pieces.entries.items() if len(x) < 200}, pieces.table, pieces.n_tensors, pieces.data
    ).joined()
    header = len(short) - len(pieces.data)
    entries = b"".join(pieces.entries.values())
    for _ in range(200):
        at, bit = drawn.randrange(header), 1 << drawn.randrange(8)
        damaged = bytearray(short)
        damaged[at] ^= bit
        counted += bool(refused(path, bytes(damaged)))
    places = [*range(24, 24 + 300), *range(24 + len(entries), 24 + len(entries) + len(pieces.table))]
    for at in drawn.sample(places, 120):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << drawn.randrange(8)
        counted += bool(refused(path, bytes(damaged)))
    assert counted > 250


ESCAPE = "\x1b[2J\x07\n\u202e"


def test_strings_of_a_file_reach_no_terminal(tmp_path: Path) -> None:
    """Control characters in keys, values, names of tensors and of the architecture are escaped in errors."""
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    pieces = files.Pieces.of(path)
    name = "x" + ESCAPE
    changes: list[dict[str, Any]] = [
        {"general.architecture": ESCAPE},
        {"general.type": ESCAPE},
        {f"llama.{ESCAPE}": ESCAPE},
        {f"{ESCAPE}.rope.x": 1},
        {"llama.rope.scaling.type": ESCAPE},
        {"llama.attention.head_count": ESCAPE},
        {"tokenizer.ggml.model": ESCAPE},
        {"tokenizer.ggml.bos_token_id": ESCAPE},
        {"tokenizer.ggml.merges": [ESCAPE]},
        {"tokenizer.ggml.scores": [ESCAPE]},
        {ESCAPE: b"\xff"},
    ]
    contents = [pieces.joined(x) for x in changes]
    extra = struct.pack("<Q", len(name.encode())) + name.encode()
    for kind, n in ((0, 1), (0, 9), (12, 1), (77, 1), (27, 1)):
        table = pieces.table + extra + struct.pack("<I", n) + struct.pack(f"<{n}Q", *[8] * n)
        table += struct.pack("<IQ", kind, len(pieces.data))
        contents.append(files.Pieces(pieces.entries, table, pieces.n_tensors + 1, pieces.data + bytes(64)).joined())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot (load|be read)") as caught:
            load_model(path)
        assert str(caught.value).isprintable()


def test_other_orders_of_bytes_and_parts_of_files_are_refused(tmp_path: Path) -> None:
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
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
