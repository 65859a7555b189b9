"""Names of models are known, or refused with the nearest known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tl_posdisent import load_model
from tl_posdisent.models.loading.load import _OFFICIAL_NAME, _lens
from tl_posdisent.models.loading.names import OWN, _of_transformer_lens, check_model_name

pytestmark = pytest.mark.tl4


def test_every_name_that_transformer_lens_takes_is_known() -> None:
    official = _lens(*_OFFICIAL_NAME)
    names = _of_transformer_lens()
    assert len(names) > 200
    for name in (*OWN, *names):
        check_model_name(name)
        assert name in OWN or official(name)


@pytest.mark.parametrize("given", ["someone/something", "./nowhere", "~/model", "a\\b", "model.gguf"])
def test_paths_and_repositories_go_on(given: str) -> None:
    check_model_name(given)


def test_an_existing_folder_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be a known name"):
        check_model_name("mymodel")
    (tmp_path / "mymodel").mkdir()
    check_model_name("mymodel")


@pytest.mark.parametrize("name", OWN)
def test_one_wrong_letter_names_the_right_one(name: str) -> None:
    """Left out, doubled or exchanged, wherever it is."""
    for i in range(1, len(name)):
        for wrong in (name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], name[:i] + "q" + name[i + 1 :]):
            if wrong != name:
                with pytest.raises(ValueError, match=f"got '{wrong}': did you mean '{name}'"):
                    check_model_name(wrong)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("no such", "owner/name of a repository"),
        ("demo", r"with load_demo_model\("),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_mistyped_name_is_loaded_from_no_hub(name: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ValueError, match=f"^name_or_dir must be .*got '{name}': .*{advice}"):
        load_model(name)
