"""Trained language models in packages that not every environment has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest

from tl_posdisent.models.loading.packaged import PACKAGED


def needs(name: str) -> None:
    """Skip a test where the packages with the model, or that read it, are not installed."""
    target = name.partition("-")[0]
    pytest.importorskip("gguf", reason=f"needs gguf (make {target} installs it)")
    for package in PACKAGED[name].packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"needs {package} (make {target} installs it)")
