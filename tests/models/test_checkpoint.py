"""Folders and repositories: a whole model computes what was saved, and none runs with tensors missing or ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import zoo
from support.command_line import run_command
from support.lanes import slow
from torch import Tensor

from tl_posdisent import load_model
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading.checkpoint import read_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = zoo.random_tokens()
NAME = "model.layers.1.self_attn.k_proj.weight"


def saved(at: Path, name: str = "llama-gqa", **options: Any) -> Path:
    zoo.hf_model(name).save_pretrained(at / "model", **options)
    return at / "model"


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


def loaded(folder: Path) -> Tensor:
    """The logits of the model that was read."""
    with torch.no_grad():
        return read_checkpoint(folder, dtype=torch.float32)[0](TOKENS, use_cache=False).logits


FURTHER = slow((name, "40KB") for name in zoo.ARCHITECTURES if name != "llama-gqa")


@pytest.mark.parametrize(("name", "size"), [("llama-gqa", "1GB"), ("llama-gqa", "40KB"), *FURTHER])
def test_what_save_pretrained_writes_is_whole(name: str, size: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size == "40KB")
    torch.testing.assert_close(loaded(folder), zoo.hf_logits(name, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: None}, f"1 tensors that are missing or have another shape .{NAME}."),
        ({NAME: torch.ones(8, 64)}, f"1 tensors that are missing or have another shape .{NAME}."),
        ({f"{NAME}_scale": torch.ones(4)}, f"1 tensors that the model would ignore .{NAME}_scale."),
    ],
)
def test_no_tensor_is_filled_in_or_ignored(change: Any, message: str, tmp_path: Path) -> None:
    def changed(tensors: dict[str, Tensor]) -> None:
        for name, x in change.items():
            tensors.pop(name, None)
            tensors |= {} if x is None else {name: x}

    with pytest.raises(ValueError, match=f"the weights are not those of this model: .*{message}"):
        load_model(with_tensors(saved(tmp_path), changed))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama-gqa", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.1.attn.bias"),
        *slow(
            [
                ("neox", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
                ("neox", "gpt_neox.layers.1.attention.bias"),
                ("neox", "gpt_neox.layers.1.attention.masked_bias"),
                ("gpt2", "h.1.attn.masked_bias"),
                ("gptj", "transformer.h.1.attn.masked_bias"),
                ("codegen", "transformer.h.1.attn.causal_mask"),
                ("gpt_neo", "transformer.h.1.attn.attention.bias"),
                ("gpt_neo", "transformer.h.1.attn.attention.masked_bias"),
                ("qwen3-next", "mtp.fc.weight"),
            ]
        ),
    ],
)
def test_buffers_that_older_versions_stored_are_harmless(name: str, extra: str, tmp_path: Path) -> None:
    """As in GPT-2 and Pythia on the hub; so is what transformers itself lists."""
    folder = with_tensors(saved(tmp_path, name), lambda tensors: tensors.update({extra: torch.ones(1, 1, 8, 8)}))
    torch.testing.assert_close(loaded(folder), zoo.hf_logits(name, TOKENS), rtol=1e-4, atol=1e-4)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    folder = with_config(saved(tmp_path), tie_word_embeddings=True)
    with_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = zoo.hf_model("llama-gqa")
    model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(loaded(folder), model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    with_tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"2 tensors that are missing .*lm_head.weight, model.embed_tokens.weight."):
        load_model(folder)


def two_sets(at: Path, first: str, second: str) -> Path:
    """A folder in which a model was saved over another, in one file or in shards."""
    for name, size in (("llama", first), ("llama-gqa", second)):
        saved(at, name, max_shard_size=size)
    return at / "model"


def with_index(folder: Path, *files: str) -> Path:
    """With an index of these files, of which the last is there."""
    (folder / files[-1]).touch()
    index = {"metadata": {}, "weight_map": {f"{n}": name for n, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def with_file(folder: Path, name: str, content: bytes = b"?") -> Path:
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (lambda at: two_sets(at, "1GB", "40KB"), r"model-00001-of-\d+.safetensors, .*, …"),
        (lambda at: with_file(saved(at), "model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
        (lambda at: with_index(saved(at), "a.safetensors", "b.safetensors"), "b.safetensors"),
        (lambda at: with_file(saved(at), "adapter_model.safetensors"), "adapter_model.safetensors"),
        (lambda at: with_file(saved(at), "adapter_model.bin"), "adapter_model.bin"),
        (lambda at: with_file(saved(at, max_shard_size="40KB"), "adapter_model.safetensors"), "adapter_model.safeten"),
    ],
    ids=[
        *("saved as shards over one file", "a shard without index", "an index"),
        *("an adapter", "an adapter in a pickle", "an adapter beside shards"),
    ],
)
def test_other_weights_beside_those_that_are_read_are_refused(make: Any, others: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"name_or_dir must be .* with model.safetensors.* beside {others}"):
        load_model(make(tmp_path))


@pytest.mark.parametrize(
    "make",
    [
        lambda at: two_sets(at, "40KB", "1GB"),
        lambda at: with_index(saved(at), "model-00001-of-00001.safetensors", "model.safetensors"),
        lambda at: with_file(saved(at), "model.safetensors.index.json"),
        lambda at: with_file(saved(at), "model.safetensors.index.json", b"[]"),
        lambda at: with_file(saved(at), "pytorch_model.bin"),
        lambda at: with_file(saved(at, max_shard_size="40KB"), "pytorch_model.bin"),
        lambda at: with_file(saved(at), "model.fp16.safetensors"),
        lambda at: with_file(saved(at), "consolidated.safetensors"),
    ],
    ids=[
        *("saved as one file over shards", "an index of this file", "a damaged index", "a list as index"),
        *("a pickle beside the file", "a pickle beside shards", "a variant", "a file of another format"),
    ],
)
def test_files_that_are_never_read_are_harmless(make: Any, tmp_path: Path) -> None:
    """What is read is safetensors, in one file or as the index says."""
    torch.testing.assert_close(loaded(make(tmp_path)), zoo.hf_logits("llama-gqa", TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"9 tensors that are missing .* .model.layers.2.input_layernorm.weight, .*, …"),
        ({"num_hidden_layers": 1}, r"9 tensors that the model would ignore .model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_configuration_that_is_not_of_these_weights_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(with_config(saved(tmp_path), **changes))


def test_attention_kernels_in_the_configuration_are_not_needed(tmp_path: Path) -> None:
    got = loaded(with_config(saved(tmp_path), _attn_implementation="flash_attention_2"))
    torch.testing.assert_close(got, zoo.hf_logits("llama-gqa", TOKENS), rtol=1e-4, atol=1e-4)


def test_a_tokenizer_of_vocabulary_and_merges_alone_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gpt2")
    letters = {letter: n for n, letter in enumerate("abcdefgh", 1)} | {"ab": 9, "<|endoftext|>": 0}
    (folder / "vocab.json").write_text(json.dumps(letters), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    tokenizer = read_checkpoint(folder, dtype=torch.float32)[1]
    assert tokenizer is not None
    assert tokenizer("abcab", add_special_tokens=False)["input_ids"] == [9, 3, 9]


def test_the_command_line_says_it_on_one_line(tmp_path: Path) -> None:
    folder = with_config(saved(tmp_path), num_hidden_layers=3)
    result = run_command("fit --no-progress --model", folder, code=2)
    line = result.stderr.rpartition("it/s]")[2].strip()  # after the bar of transformers, which tests do not turn off
    assert line.startswith("error: the weights are not those of this model")
    assert "\n" not in line
    assert not result.stdout


def test_a_repository_in_the_cache_of_a_hub_is_read_as_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    folder = repository / "snapshots" / ("0" * 40)
    zoo.hf_model("llama-gqa").save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    with torch.no_grad():
        got = load_model("someone/tiny", device="cpu")(TOKENS)
    torch.testing.assert_close(got, zoo.hf_logits("llama-gqa", TOKENS), rtol=1e-3, atol=1e-3)
    with_config(folder, num_hidden_layers=3)
    with pytest.raises(ValueError, match="9 tensors that are missing"):
        load_model("someone/tiny", device="cpu")
    with_file(folder, "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors beside model-00001-of-00002.safetensors"):
        load_model("someone/tiny", device="cpu")


def test_experts_of_another_architecture(tmp_path: Path) -> None:
    """Of Mixtral, whose names in files are not those in the model."""
    config = transformers.MixtralConfig(**zoo.ARCHITECTURES["llama-gqa"].arguments, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path), model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    one = next(name for name in load_file(tmp_path / "model.safetensors") if ".1." in name and ".experts.2." in name)
    with_tensors(tmp_path, lambda tensors: tensors.pop(one))
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        load_model(tmp_path)


def test_the_text_part_of_a_model_that_sees_is_whole(tmp_path: Path) -> None:
    """Of Llama 4, whose class for text does not have the other parts."""
    text = zoo.ARCHITECTURES["llama-gqa"].arguments | {"intermediate_size_mlp": 96, "num_local_experts": 2}
    vision = {
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
        **{"image_size": 28, "patch_size": 14, "vision_output_dim": 32},
        **{"projector_input_dim": 32, "projector_output_dim": 32},
    }
    config = transformers.Llama4Config(text_config=text | {"head_dim": 8}, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path), model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    with_tensors(tmp_path, lambda tensors: tensors.pop("language_model.model.norm.weight"))
    with pytest.raises(ValueError, match=r"1 tensors that are missing .*model.norm.weight."):
        load_model(tmp_path)
