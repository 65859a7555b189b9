"""The page on the deposit says what its measurements say."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pandas as pd
import pytest
from support.pages import ROOT

pytestmark = pytest.mark.tl4

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PAGE, README = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/deposit.md", "README.md"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "docs" / "figures" / "deposit_96_heads.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_of_the_measurements(script: ModuleType) -> None:
    assert script.markdown(script.summary(script.finished())) in PAGE


def test_models_with_one_necessary_head(script: ModuleType) -> None:
    """The sentences that count them, in words up to ten."""
    table: pd.DataFrame = script.finished().query("size == 'medium'")
    alone = {name: int(script.one_necessary(table.query("encoding == @name")).sum()) for name in script.FIRST}
    models = table["encoding"].value_counts()
    rotating = models["rope"] + models["sinusoidal_rope"]
    one = NUMBERS[alone["rope"] + alone["sinusoidal_rope"]]
    text = " ".join(README.split())
    assert f"Of {rotating} rotary models with 96 heads, {one} have one head that matters" in text
    text = " ".join(PAGE.split())
    assert f"{NUMBERS[alone['rope']].capitalize()} of {models['rope']} models with rotation alone have one" in text
    assert f"of the {models['sinusoidal_rope']} hybrids {NUMBERS[alone['sinusoidal_rope']]}" in text


def test_one_necessary_head_is_one(script: ModuleType) -> None:
    """Large, and alone."""
    table = pd.DataFrame({"mean_accuracy_drop": [0.2, 0.2, 0.08, 0.0], "mean_accuracy_second": [0.05, 0.06, 0.0, 0.0]})
    assert script.one_necessary(table).tolist() == [True, False, False, False]
