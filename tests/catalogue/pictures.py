"""Rows about widgets and figures."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tl_posdisent import (
    plot_distance,
    plot_heads,
    plot_shares,
    show_interventions,
    show_parts,
    show_patterns,
    show_scores,
)
from tl_posdisent.viz import (
    Widget,
    plot_deposit,
    plot_distance_sources,
    plot_dynamics,
    plot_length,
    plot_perturbation,
    plot_subspaces,
    plot_substitution,
    plot_training,
    plot_verdicts,
    show_change,
    show_key_importance,
    show_query_bias,
)

from .given import NAN, SCORES, TOKENS, fit, model, words
from .row import Row, gives, refused

W = words(12)
HEADS = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "r": [0.5, 0.25]})
EVIL = "</script><script>alert(1)</script>"


def _no_script() -> bool:
    """A token that would be a script is text, in the page and in its data."""
    return EVIL not in str(show_scores(fit(), [EVIL, *W[1:]], heads=[0]))


def _title() -> bool:
    return EVIL not in str(show_scores(fit(), W, heads=[0], title=EVIL))


def _shown(**changed: Any) -> Any:
    return show_interventions(model(), TOKENS, **{"hooks": [], "layer": 0, **changed})


def _bad_file(at: Any) -> Any:
    return show_scores(fit(), W, heads=[0]).save(at / "no" / "such" / "folder.html")


ROWS: list[Row] = [
    gives("show_scores", "a token that is a script", lambda at: _no_script()),
    gives("show_scores", "a title that is a script", lambda at: _title()),
    gives(
        "show_scores",
        "tokens of NUL, RTL and emoji",
        lambda at: "\0" not in str(show_scores(fit(), ["\0", "\u202e", "🐈", *W[3:]], heads=[0])),
    ),
    refused("show_scores", "no fit", lambda at: show_scores(SCORES, W), "fit must be", "Tensor"),
    refused("show_scores", "too few tokens", lambda at: show_scores(fit(), W[:5]), "tokens must be as many"),
    refused(
        "show_scores", "ids in place of tokens", lambda at: show_scores(fit(), TOKENS[0].tolist()), "tokens must be"
    ),
    refused("show_scores", "an unknown part", lambda at: show_scores(fit(), W, "all"), "part must be"),
    refused(
        "show_scores", "a residual without scores", lambda at: show_scores(fit(), W, "residual"), "scores must be given"
    ),
    refused("show_scores", "scale 0", lambda at: show_scores(fit(), W, scale=0.0), "scale must be"),
    refused("show_scores", "text 2 of 2", lambda at: show_scores(fit(), W, text=2), "text must be"),
    refused("show_scores", "more cells than allowed", lambda at: show_scores(fit(), W, max_cells=10), "max_cells"),
    refused("show_parts", "head 8 of 8", lambda at: show_parts(fit(), W, 8), "from 0 to 7"),
    refused("show_parts", "head in words", lambda at: show_parts(fit(), W, "0"), "head must be"),
    refused(
        "show_patterns",
        "no probabilities",
        lambda at: show_patterns(fit(), W, SCORES * 9),
        "pattern must be probabilities",
    ),
    refused(
        "show_patterns",
        "another shape",
        lambda at: show_patterns(fit(), W, SCORES[:, :2].softmax(-1)),
        "pattern must have",
    ),
    refused(
        "show_change", "unequal shapes", lambda at: show_change(SCORES, SCORES[:1], W), "after must have the shape"
    ),
    refused("show_change", "NaN", lambda at: show_change(SCORES, SCORES * NAN, W), "after must be finite"),
    refused("show_change", "integers", lambda at: show_change(SCORES.long(), SCORES, W), "before must be"),
    refused("show_interventions", "an unknown view", lambda at: _shown(what="z"), "what must be"),
    refused("show_interventions", "layer 2 of 2", lambda at: _shown(layer=2), "from 0 to 1"),
    refused("show_interventions", "a hook that does not exist", lambda at: _shown(hooks=[("x", print)]), "'x'"),
    refused("show_key_importance", "no fit", lambda at: show_key_importance({}, W), "fit must be"),
    refused("show_key_importance", "no head", lambda at: show_key_importance(fit(), W, heads=[]), "heads must"),
    refused("show_query_bias", "no fit", lambda at: show_query_bias(None, W), "fit must be"),
    refused(
        "show_query_bias", "a token too many", lambda at: show_query_bias(fit(), [*W, "x"]), "tokens must be as many"
    ),
    refused("Widget", "a link by number", lambda at: Widget("", "", title="", cdn=1), "cdn must be"),
    refused("Widget", "a folder that does not exist", lambda at: _bad_file(at), "folder", error=FileNotFoundError),
    refused("plot_heads", "no table", lambda at: plot_heads([1], "r"), "table must be", "list"),
    refused("plot_heads", "no such column", lambda at: plot_heads(HEADS, "r2"), "table must have the columns", "r2"),
    refused("plot_heads", "no rows", lambda at: plot_heads(HEADS[:0], "r"), "table must have rows"),
    refused(
        "plot_heads", "a head twice", lambda at: plot_heads(pd.concat([HEADS, HEADS]), "r"), "table must have one row"
    ),
    refused("plot_heads", "words as values", lambda at: plot_heads(HEADS.assign(r="a"), "r"), "must be numbers"),
    refused("plot_heads", "limits that fall", lambda at: plot_heads(HEADS, "r", limits=(1.0, 0.0)), "limits must be"),
    gives("plot_heads", "values of NaN stay blank", lambda at: bool(plot_heads(HEADS.assign(r=NAN), "r").data)),
    refused("plot_subspaces", "a table of heads", lambda at: plot_subspaces(HEADS), "table must have the columns"),
    refused(
        "plot_distance_sources",
        "a table of heads",
        lambda at: plot_distance_sources(HEADS),
        "table must have the columns",
    ),
    refused("plot_verdicts", "a table of heads", lambda at: plot_verdicts(HEADS), "table must have the columns"),
    refused("plot_shares", "a table of heads", lambda at: plot_shares(HEADS), "table must have the columns"),
    refused(
        "plot_substitution", "a table of heads", lambda at: plot_substitution(HEADS), "table must have the columns"
    ),
    refused("plot_substitution", "an unknown measure", lambda at: plot_substitution(HEADS, "r"), "measure must be"),
    refused(
        "plot_deposit",
        "a table of heads",
        lambda at: plot_deposit(HEADS, better="lower"),
        "table must have the columns",
    ),
    refused("plot_deposit", "an unknown direction", lambda at: plot_deposit(HEADS, better="up"), "better must be"),
    refused(
        "plot_perturbation", "a table of heads", lambda at: plot_perturbation(HEADS), "table must have the columns"
    ),
    refused("plot_length", "no tables", lambda at: plot_length({}), "tables must have"),
    refused("plot_length", "a table of heads", lambda at: plot_length(HEADS), "must have"),
    refused("plot_length", "one measure as a word", lambda at: plot_length(HEADS, "loss"), "measures must be"),
    refused("plot_training", "a table of heads", lambda at: plot_training(HEADS), "must have the columns"),
    refused("plot_dynamics", "a table of heads", lambda at: plot_dynamics(HEADS), "table must have the columns"),
    refused("plot_distance", "a table of heads", lambda at: plot_distance(HEADS), "must have the columns"),
    refused("plot_distance", "wavelength 0", lambda at: plot_distance(fit(), wavelengths=[0.0]), "wavelengths must be"),
]
