"""Position and content in attention."""

from .maths.additive import AdditiveFit, fit_additive, score_correlation
