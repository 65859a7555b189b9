"""Laws of damaged GGUF files: the package's own error, at once, without memory for what the file cannot hold."""

from __future__ import annotations

import random
import resource
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo

from tl_posdisent.models.loading.gguf import read_gguf
from tl_posdisent.models.loading.gguf_file import read_gguf_file
from tl_posdisent.models.loading.load import load_model

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")


@pytest.fixture(params=["llama", "gpt2"])
def pieces(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    files.write_gguf(path := tmp_path / "model.gguf", files.model_of(request.param), request.param)
    return files.Pieces.of(path)


def refused(path: Path, content: bytes) -> str:
    """The error of a file with this content, or nothing where it is read."""
    path.write_bytes(content)
    message: str = files.error_of(path)
    assert message.isprintable()
    assert not message or str(path) in message
    return message


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_is_read_as_by_the_package_gguf(kind: str, tmp_path: Path) -> None:
    """Its reader takes twenty times as long, and checks no length."""
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama", kind)
    content = files.Pieces.of(path).joined({"a.list": [1.5, 2.5], "a.truth": True, "a.large": 2**40, "a.small": -3})
    path.write_bytes(content)
    own, slow = read_gguf_file(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in list(slow.fields.items())[3:]}
    assert {k: x.tolist() if isinstance(x, np.ndarray) else x for k, x in own.metadata.items()} == expected
    assert list(own.tensors) == [tensor.name for tensor in slow.tensors]
    for tensor in slow.tensors:
        held = own.tensors[tensor.name]
        assert (held.shape, held.kind) == (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type)
        np.testing.assert_array_equal(held.numbers(), gguf.dequantize(tensor.data, tensor.tensor_type))


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
    name = "llama" if "llama.block_count" in pieces.entries else "gpt2"
    keys = [key for key in pieces.entries if key.startswith(f"{name}.") and not key.endswith(("epsilon", "freq_base"))]
    refused(tmp_path / "model.gguf", pieces.joined())  # so that all modules are imported
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in keys:
        for value in (2**31 - 1, 2**31, 2**32 - 1, 2**63, 0, -1):
            message = refused(tmp_path / "model.gguf", pieces.joined({key: value}))
            free = key == "llama.context_length" and value == 2**31 - 1
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
        {ESCAPE: [[1], [2]]},
    ]
    contents = [pieces.joined(x) for x in changes]
    extra = struct.pack("<Q", len(name.encode())) + name.encode()
    for kind, n in ((0, 1), (0, 9), (12, 1), (77, 1), (27, 1)):
        table = pieces.table + extra + struct.pack("<I", n) + struct.pack(f"<{n}Q", *[8] * n)
        table += struct.pack("<IQ", kind, len(pieces.data))
        contents.append(files.Pieces(pieces.entries, table, pieces.n_tensors + 1, pieces.data + bytes(64)).joined())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"\\x1b|UTF-8|type 9|array of numbers") as caught:
            load_model(path)
        assert str(caught.value).isprintable()


def test_other_orders_of_bytes_and_parts_of_files_are_refused(tmp_path: Path) -> None:
    files.write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    pieces = files.Pieces.of(path)
    whole = pieces.joined()
    for content, words in (
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "its bytes are in big-endian order"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "its version is 1"),
        (b"ggml" + whole[4:], "it does not begin with GGUF"),
        (pieces.joined({"split.count": 3}), "split.count must be 1, for a whole language model, and is 3"),
        (pieces.joined({"general.type": "adapter"}), "general.type must be 'model'|general.type must be model"),
        (pieces.joined({"general.alignment": 24}), "general.alignment must be a power of two, and is 24"),
        (pieces.joined({"gemma3.rope.freq_base": 1e6}), "it states gemma3.rope.freq_base, which is of another arch"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            load_model(path)


def test_a_file_without_a_base_of_rotation_has_the_format_s_and_says_so(tmp_path: Path) -> None:
    """As files of Llama 2; Gemma 2 and StableLM never state one, and Gemma 3 always."""
    for name, warned in (("llama", True), ("gemma2", False), ("stablelm", False)):
        model = files.model_of(name)
        files.write_gguf(path := tmp_path / "model.gguf", model, name, **{"rope.freq_base": None})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            read, _ = read_gguf(path, dtype=torch.float32)
        said = [str(x.message) for x in found if "rope.freq_base" in str(x.message)]
        assert len(said) == warned
        assert not warned or "llama.rope.freq_base: 10000, the default of the format, is taken" in said[0]
        rotary = model.config.rope_parameters | {"rope_theta": 10000.0}
        expected = files.with_config(model, rope_parameters=rotary)
        tokens = zoo.random_tokens(40)
        with torch.no_grad():
            torch.testing.assert_close(read(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    files.write_gguf(path, files.model_of("gemma3"), "gemma3", **{"rope.freq_base": None})
    with pytest.raises(ValueError, match=r"it does not state gemma3.rope.freq_base, which is needed"):
        read_gguf(path, dtype=torch.float32)
