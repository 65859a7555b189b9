"""Which columns of a table are seen in a script, at 80 columns."""

from __future__ import annotations

import pandas as pd
import pytest


def printed(table: pd.DataFrame) -> set[str]:
    """The columns that ``print`` shows; pandas prints the ends of a wide table, and reads the width of the terminal."""
    options = pd.option_context("display.max_columns", 0, "display.width", 80, "display.max_rows", 6)
    with options, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return {*repr(pd.DataFrame(table)).splitlines()[0].split()}
