"""Trained language models in packages that not every environment has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

import tl_posdisent as tp
from tl_posdisent.models.loading.packaged import PACKAGED


def needs(name: str) -> None:
    """Skip a test where the packages with the model, or that read it, are not installed."""
    command = f"make .venv/{name.partition('-')[0]}.stamp"
    pytest.importorskip("gguf", reason=f"needs gguf ({command} installs it)")
    for package in PACKAGED[name].packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"needs {package} ({command} installs it)")


def packaged_model(name: str) -> Any:
    """Load the model in a bridge, or skip the test without its packages. Files take it in a fixture of their module."""
    needs(name)
    return tp.load_model(name, backend="bridge")
