"""Sweeps over trainings: the demo model's, synthetic ones, Hugging Face folders, and revisions as Pythia has them."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import run_command
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tl_posdisent import additivity, load_model
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.sweeps import Text, failures, jobs, sweep
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow

WORDS = "My friends and fellow citizens, we hold these truths"


def of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    rows = table[table["step"] == step].reset_index(drop=True)
    return rows[rows.columns[10:]]  # behind those that name the job


@functools.cache
def synthetic(seed: int) -> SyntheticModel:
    config = SyntheticConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=16, d_vocab=9, n_ctx=8, n_out=3)
    return SyntheticModel(config, seed=seed)


def test_synthetic_checkpoints_read_token_ids(tmp_path: Path) -> None:
    for step in (0, 10):
        save_checkpoint(synthetic(step), tmp_path / f"step-{step:06d}.safetensors")
    ids = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]
    todo = jobs(tmp_path, "additivity", Text.of(ids), checkpoints=[10, 0])
    table = sweep(todo, out=tmp_path / "out", progress=False)
    assert table["step"].drop_duplicates().tolist() == [10, 0]
    for step in (0, 10):
        model = load_checkpoint(tmp_path / f"step-{step:06d}.safetensors")
        direct = additivity(model, torch.tensor(ids), progress=False)
        pd.testing.assert_frame_equal(of_step(table, step), direct, check_exact=True)
    with pytest.warns(UserWarning, match="1 of 1 jobs failed"):
        sweep(jobs(tmp_path, "additivity", WORDS, checkpoints=[10]), out=tmp_path / "out", progress=False)
    assert "the model has no tokenizer" in failures(tmp_path / "out")["message"][0]


def test_checkpoints_may_be_an_iterator(tmp_path: Path) -> None:
    """Each model has all of them."""
    for n, (folder, step) in enumerate(itertools.product("ab", (0, 10))):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_checkpoint(synthetic(n), tmp_path / folder / f"step-{step:06d}.safetensors")
    of_both = functools.partial(jobs, [tmp_path / "a", tmp_path / "b"], "additivity", Text.of([1, 2, 3, 4]))
    assert of_both(checkpoints=iter([10, 0])) == of_both(checkpoints=[10, 0])
    assert len(of_both(checkpoints=(n for n in (10, 0)))) == 4


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    """The same weights elsewhere are the same job; others in the same place are another, refused by the old one."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_checkpoint(synthetic(seed), tmp_path / f"{name}.safetensors")
    text = Text.of([1, 2, 3, 4])
    a, b, c = (jobs(tmp_path / f"{name}.safetensors", "additivity", text)[0] for name in "abc")
    assert a.hash == b.hash != c.hash
    table = sweep([a, b], out=tmp_path / "out", progress=False)  # done once, and shown for both
    assert table["model"].drop_duplicates().tolist() == [a.model, b.model]
    shutil.copy(tmp_path / "c.safetensors", tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="1 of 1 jobs failed"):
        sweep([a], out=tmp_path / "other", progress=False)
    assert "have changed since this job was created" in failures(tmp_path / "other")["message"][0]


def neox(seed: int) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(config).eval()


def save(model: GPTNeoXForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)


def test_folders_of_checkpoints_of_hugging_face(tmp_path: Path) -> None:
    for step in (100, 20):
        save(neox(step), tmp_path / f"checkpoint-{step}")
    todo = jobs(tmp_path, "additivity", WORDS, checkpoints="all")
    table = sweep(todo, out=tmp_path / "out", progress=False)
    assert table["step"].drop_duplicates().tolist() == [20, 100]
    for step in (20, 100):
        direct = additivity(load_model(tmp_path / f"checkpoint-{step}"), WORDS, progress=False)
        pd.testing.assert_frame_equal(of_step(table, step), direct, check_exact=True)
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call(tmp_path)


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: jobs(folder, "additivity", WORDS), r"checkpoint must be one of \[20, 100\]"),
    (lambda folder: jobs(folder, "additivity", WORDS, checkpoints=[3]), r"checkpoint must be one of \[20, 100\]"),
    (lambda folder: jobs(folder, "additivity", WORDS, checkpoints=["best"]), r"checkpoint must be one of \[20, 100\]"),
    (lambda folder: jobs(folder / "out", "additivity", WORDS, checkpoints="all"), "folder must have checkpoints"),
]


def test_revisions_of_a_named_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Pythia's are had: from a hub's cache, which is all that there is without a network."""
    words = tmp_path / "words.txt"
    words.write_text(WORDS, encoding="utf-8")
    hub = tmp_path / "hub" / "models--someone--tiny-neox"
    for step in (0, 1000):
        commit = f"{step:040x}"
        save(neox(step), hub / "snapshots" / commit)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / f"step{step}").write_text(commit, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.parent))  # read when a process begins, so in one of its own
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line = "sweep --model someone/tiny-neox --checkpoints 0,1000,7 --length 16 --workers 1 --no-progress"
    with pytest.warns(UserWarning, match="1 of 3 jobs failed"):
        result = run_command(line, "--text", words, "--out", tmp_path / "out")
    assert "cannot load revision step7 of someone/tiny-neox" in failures(tmp_path / "out")["message"][0]
    text = Text.of(words, length=16)
    todo = jobs("someone/tiny-neox", "additivity", text, checkpoints=["step1000", 0])
    table = sweep(todo, out=tmp_path / "out", progress=False)  # only read: this process could not load it
    for step in (0, 1000):
        model = load_model(hub / "snapshots" / f"{step:040x}")
        direct = additivity(model, text.tokens(model), progress=False)
        pd.testing.assert_frame_equal(of_step(table, step), direct, check_exact=True)
        assert f"{direct['r'].mean():.4g}" in result.stdout
    assert "trust_remote_code" not in repr(todo)  # there is no way to ask for it
