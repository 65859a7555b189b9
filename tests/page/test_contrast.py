"""Text on coloured tokens has enough contrast (WCAG 2, level AA)."""

from __future__ import annotations

import numpy as np
import pytest
from support.contrast import ENOUGH, contrast

from tl_posdisent.viz.palette import BLACK, DIVERGING, WHITE, on_scale, rgb
from tl_posdisent.viz.widgets.offline import DARK_TOKEN, adapted, library


def test_text_on_coloured_tokens() -> None:
    """Of circuitsvis's own rule, with another limit; it rounds the brightness to two digits."""
    assert library().count(f'brightness()<{DARK_TOKEN}?"white":"black"') == 3
    for share in np.linspace(0, 1, 511):
        behind = on_scale(DIVERGING, float(share))
        brightness = round(float(np.array(rgb(behind)) @ (0.299, 0.587, 0.114)) / 255, 2)
        assert contrast(rgb(WHITE if brightness < DARK_TOKEN else BLACK), rgb(behind)) >= ENOUGH, behind


def test_a_library_that_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"circuitsvis's library must contain .* but that of [\d.]+ does not: ins"):
        adapted(library())  # whose rule for text is replaced
