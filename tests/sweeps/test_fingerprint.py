"""What identifies a folder's model in a sweep: a file that changes its tokens or weights makes another job of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.sweeps import Text, jobs

Make = Callable[[Path], dict[str, str]]
"""Writes a tokenizer's files, and returns others in their place."""

TEXT = "we hold [NEW] these truths"
NEW = {"added_tokens.json": {"[NEW]": 1024}, "special_tokens_map.json": {"additional_special_tokens": ["[NEW]"]}}
LETTERS = {c: n for n, c in enumerate(["<|endoftext|>", *map(chr, range(33, 127)), "\u0120", "he", "th", "se"])}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "we", "hold", "these", "truths", "new"]


def fast(folder: Path) -> dict[str, str]:
    demo_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    merges = json.loads((folder / "tokenizer.json").read_text())
    merges["model"]["merges"] = merges["model"]["merges"][:200]
    named = config | NEW["special_tokens_map.json"]
    return {"tokenizer.json": json.dumps(merges), "tokenizer_config.json": json.dumps(named)}


def byte_pairs(folder: Path) -> dict[str, str]:
    """GPT-2's files."""
    (folder / "vocab.json").write_text(json.dumps(LETTERS))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    exchanged = LETTERS | {"h": LETTERS["e"], "e": LETTERS["h"]}
    return {"vocab.json": json.dumps(exchanged), "merges.txt": "#version: 0.2\nt h\n"}


def words(folder: Path) -> dict[str, str]:
    """BERT's."""
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return {"vocab.txt": "\n".join([*WORDS[:5], *WORDS[:4:-1]])}


@pytest.mark.parametrize("make", [fast, byte_pairs, words])
def test_a_file_that_changes_the_tokens_makes_another_job(make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert" if make is words else "gpt2"}))
    changes = make(tmp_path) | {name: json.dumps(content) for name, content in NEW.items()}

    def job() -> str:
        return jobs(tmp_path, "additivity", Text.of("words"))[0].hash

    def ids() -> Any:
        return AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)(TEXT).input_ids

    before = job(), ids()
    for name, content in changes.items():
        file = tmp_path / name
        old = file.read_bytes() if file.exists() else None
        file.write_text(content)
        assert ids() != before[1], name  # or it would be no case
        assert job() != before[0], name
        file.unlink() if old is None else file.write_bytes(old)
        assert (job(), ids()) == before


@pytest.mark.parametrize(
    ("name", "counts"),
    [(name, True) for name in ("config.json", "spiece.model", "qwen.tiktoken", "chat_template.jinja", "source.spm")]
    + [("model-2.safetensors", True), ("README.md", False), ("generation_config.json", False)]
    + [(name, False) for name in ("LICENSE.txt", ".gitattributes", "optimizer.pt", "trainer_state.json")],
)
def test_which_files_of_a_folder_count(name: str, counts: bool, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = []
    for content in (None, b"one", b"two"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        found.append(jobs(tmp_path, "additivity", Text.of([1, 2, 3]))[0].hash)
    assert len(set(found)) == (3 if counts else 1)
