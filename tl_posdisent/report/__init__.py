"""The measurements of one model and one text as one HTML file that needs no network."""

from tl_posdisent.report.build import report

__all__ = ["report"]
