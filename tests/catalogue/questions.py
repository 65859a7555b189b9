"""Rows about experiments on a model and a text."""

from __future__ import annotations

import pandas as pd
import torch

from tl_posdisent import (
    additivity,
    capture,
    controlled_distance,
    estimate,
    logit_difference,
    positional_symbolic,
    report,
    subspace_patterns,
    trained_vs_random,
)
from tl_posdisent.experiments import content_position_terms, shapley_values
from tl_posdisent.models import read_layers

from .given import NAN, TOKENS, model
from .row import Row, gives, refused

NO_CELL = torch.zeros(12, 12, dtype=torch.bool)


def _no_layers() -> bool:
    """An empty list of layers is a mistake and not all of them; so is a generator that has run out."""
    return len(read_layers(model(), iter([0]))) == 1


ROWS: list[Row] = [
    refused(
        "additivity",
        "a mask that leaves nothing",
        lambda at: additivity(model(), TOKENS, mask=NO_CELL, progress=False),
        "mask must",
    ),
    refused(
        "additivity",
        "a mask beyond what the layer shows",
        lambda at: additivity(model(), TOKENS, mask="full", progress=False),
        "mask",
    ),
    refused(
        "additivity", "blocks of no rows", lambda at: additivity(model(), TOKENS, block=0, progress=False), "block must"
    ),
    refused(
        "additivity", "pool by number", lambda at: additivity(model(), TOKENS, pool=1, progress=False), "pool must be"
    ),
    refused(
        "additivity",
        "a layer twice",
        lambda at: additivity(model(), TOKENS, layers=[0, 0], progress=False),
        "layers must",
    ),
    refused("capture", "scores by number", lambda at: next(capture(model(), TOKENS, scores=2)), "scores must be"),
    refused(
        "controlled_distance",
        "no distances",
        lambda at: controlled_distance(model(), TOKENS, distances=[], progress=False),
        "distances must",
    ),
    refused(
        "controlled_distance",
        "all tokens left out",
        lambda at: controlled_distance(model(), TOKENS, sinks=12, progress=False),
        "sinks must",
    ),
    refused(
        "controlled_distance",
        "sinks -1",
        lambda at: controlled_distance(model(), TOKENS, sinks=-1, progress=False),
        "sinks must",
    ),
    refused(
        "subspace_patterns",
        "distance NaN",
        lambda at: subspace_patterns(model(), TOKENS, distances=[NAN], progress=False),
        "distances must",
    ),
    refused(
        "positional_symbolic",
        "all tokens left out",
        lambda at: positional_symbolic(model(), TOKENS, sinks=11, progress=False),
        "sinks must",
    ),
    refused(
        "trained_vs_random",
        "no seeds",
        lambda at: trained_vs_random(model(), TOKENS, seeds=[], progress=False),
        "seeds must",
    ),
    refused(
        "trained_vs_random",
        "by text",
        lambda at: trained_vs_random(model(), TOKENS, by="text", progress=False),
        "by must be",
    ),
    refused(
        "content_position_terms",
        "layer 2 of 2",
        lambda at: content_position_terms(model(), TOKENS, 2),
        "from 0 to 1",
        "got 2",
    ),
    refused(
        "content_position_terms",
        "an unknown place for the mean",
        lambda at: content_position_terms(model(), TOKENS, 0, grand_mean="none"),
        "grand_mean must",
    ),
    refused("estimate", "length 0", lambda at: estimate(model(), 0), "length must be"),
    refused("estimate", "an unknown tool", lambda at: estimate(model(), 64, tool="guess"), "tool must be"),
    refused("estimate", "batch -1", lambda at: estimate(model(), 64, batch=-1), "batch must be"),
    refused("report", "a folder as the file", lambda at: report(model(), TOKENS, at, progress=False), "path"),
    refused(
        "report",
        "control -1",
        lambda at: report(model(), TOKENS, at / "r.html", control=-1, progress=False),
        "control must",
    ),
    refused(
        "report",
        "an unknown section",
        lambda at: report(model(), TOKENS, at / "r.html", sections=["all"], progress=False),
        "sections must",
    ),
    refused(
        "report",
        "no sections",
        lambda at: report(model(), TOKENS, at / "r.html", sections=[], progress=False),
        "sections must",
    ),
    refused("read_layers", "no layers", lambda at: read_layers(model(), []), "layers must"),
    refused("read_layers", "layer 0.0", lambda at: read_layers(model(), [0.0]), "layers must"),
    gives("read_layers", "layers from a generator", lambda at: _no_layers()),
    refused("shapley_values", "no table", lambda at: shapley_values([1.0]), "table must be"),
    refused(
        "shapley_values",
        "a subset left out",
        lambda at: shapley_values(
            pd.DataFrame({"scope": ["all"], "put_in": ["fit"], "keep": ["distance"], "loss": [1.0]})
        ),
        "table must have one row for each of the 16 subsets",
    ),
    refused("logit_difference", "words", lambda at: logit_difference(" Mary"), "answers must be token ids"),
    refused("logit_difference", "a half position", lambda at: logit_difference(3, position=0.5), "position must be"),
]
