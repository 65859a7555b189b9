"""What the page of results says: each claim of the two papers, each finding, and the numbers that it rests on."""

from __future__ import annotations

from typing import Literal, NamedTuple

Line = tuple[str, str, str, int]  # what is measured; study, row and length of the texts in the tables
Status = Literal["Reproduced", "In part", "Not", "Not tested"]


class Claim(NamedTuple):
    """A claim of [A], with the lines of the tables that say whether it holds here."""

    claim: str
    paper: str
    lines: list[Line]
    status: Status
    why: str


class SyntheticClaim(NamedTuple):
    """A claim of [B] about models that are trained on a synthetic task."""

    claim: str
    paper: str
    here: str
    status: Status
    why: str


class Finding(NamedTuple):
    """A finding of our own, and what was tried in order to refute it."""

    finding: str
    lines: list[Line]
    attack: str


OPENING = """# Results

Two tables: what the two papers claim beside what we measure, and what we find ourselves. A finding stands here only if
it survived an attempt to refute it, which the last column names.

[A] is Han and Ji, [arXiv 2503.13305](https://arxiv.org/abs/2503.13305); [B] is Gu et al., [arXiv
2505.13027](https://arxiv.org/abs/2505.13027). *Models*: SmolLM2-135M-Instruct (30 layers of 9 heads, 3 key heads;
4-bit weights, instruction-tuned) and Gemma 3 270M (18 layers of 4 heads, one key head; base, 4-bit weights, five in six
layers with a window of 512 tokens). *Texts*: eight of 256 tokens unless a row says otherwise (four of 1024; fewer where
the demo text, which the package contains, is shorter); speeches of 2001 to 2021 and WikiText-2 are not in the
repository. ± is a standard error over texts, or over what the row names. `make findings` measures the column *demo
text* ([below](#one-command)); the tables in `docs/findings/tables` have every number with the call that gives it.

*Random* weights have the standard deviation that the model's configuration states. *Controls* are fitted in the same
way as a head's own scores ({py:func}`~tl_posdisent.additivity`):

| control | what is kept | which question it answers |
|---|---|---|
| random weights | the architecture | is it learned? |
| shuffled weights | the sizes of all weights | is it due to scale? |
| random queries and keys | the trained residual stream | is the stream enough? |
| turned | the sizes and the concentration of queries and keys | do their places in the rotary subspaces matter? |
| foreign keys | queries and keys, each as trained | does it matter which keys a head pairs its queries with? |

## Claims of [A]"""

CLAIMS_A = [
    Claim(
        "Scores are nearly a sum of a position part and a content part",
        "0.959",
        [
            ("*r*, three-axis sum (the paper's table)", "controlled", "r_three_axis, trained", 256),
            ("*r*, two-axis sum (its equation)", "controlled", "r_two_axis, trained", 256),
        ],
        "In part",
        "The paper's figure lies between the two sums.",
    ),
    Claim(
        "… in all layers and heads",
        "all",
        [
            ("*r*, three-axis, lowest layer", "controlled", "r_three_axis, lowest layer, trained", 256),
            ("share of heads above 0.9", "controlled", "share of heads with r_three_axis above .9, trained", 256),
        ],
        "Not",
        "Layers with many induction heads are the least additive.",
    ),
    Claim(
        "Random initialisation is far from it",
        "far lower",
        [
            ("*r*, three-axis, random", "controlled", "r_three_axis, random", 256),
            ("*r*, two-axis, random", "controlled", "r_two_axis, random", 256),
        ],
        "Reproduced",
        "The two-axis sum separates less.",
    ),
    Claim(
        "At a dummy distance the key component stays as it is",
        "stays",
        [
            (
                "correlation with that at distance 64",
                "key_component",
                "key component, own and distance 64, trained",
                256,
            ),
            ("at distance 1", "key_component", "key component, own and distance 1, trained", 256),
            ("random, at distance 64", "key_component", "key component, own and distance 64, random", 256),
            (
                "another head's, at 64",
                "key_component",
                "key component, own and distance 64 of another head, trained",
                256,
            ),
        ],
        "In part",
        "",
    ),
    Claim(
        "… and the scores shift by the distance component",
        "shift",
        [
            (
                "correlation of mean score and component",
                "key_component",
                "mean score at a distance and distance component, distances, correlation, trained",
                256,
            ),
            (
                "slope",
                "key_component",
                "mean score at a distance and distance component, distances, slope, trained",
                256,
            ),
            (
                "correlation with another head's",
                "key_component",
                "mean score at a distance and distance component, distances, correlation with another head's, trained",
                256,
            ),
        ],
        "In part",
        "",
    ),
    Claim(
        "Observation 1: keys are alike in fast subspaces, content is in slow ones",
        "seen in figures",
        [
            (
                "similarity of keys, wavelengths below 16",
                "subspaces",
                "key_concentration, wavelengths below 16, trained",
                256,
            ),
            ("random", "subspaces", "key_concentration, wavelengths below 16, random", 256),
            ("above 4096", "subspaces", "key_concentration, wavelengths above 4096, trained", 256),
            ("share of content above 4096", "subspaces", "semantic, wavelengths above 4096, trained", 256),
            ("random", "subspaces", "semantic, wavelengths above 4096, random", 256),
        ],
        "In part",
        "Content is in slow subspaces without training, too.",
    ),
    Claim(
        "Theorem 2: the spread of keys bounds the interaction",
        "a proof",
        [
            ("interaction distance:key", "bound", "distance:key, share, trained", 256),
            ("bound by pairs of subspaces", "bound", "distance:key, pairwise, trained", 256),
            ("by each alone", "bound", "distance:key, separate, trained", 256),
            ("share of heads in which both hold", "bound", "distance:key, valid, trained", 256),
        ],
        "Reproduced",
        "The bound by each subspace alone is far from the interaction.",
    ),
    Claim(
        "Rotating subspaces can represent any function of the distance",
        "any",
        [
            ("r² of −log(1 + d)", "capacity", "r2 of -log(1 + d)", 450),
            ("r² of d < 8", "capacity", "r2 of d < 8", 450),
            ("r² of d = 1", "capacity", "r2 of d = 1", 450),
        ],
        "Not",
        "Not with a model's frequencies and coefficients of moderate size: smooth functions only.",
    ),
    Claim(
        "Up to 5 % of the words out of place cost little",
        "little",
        [
            ("loss added by order, 5 %", "perturbation", "added loss, order, 5%", 256),
            ("10 %", "perturbation", "added loss, order, 10%", 256),
            ("25 %", "perturbation", "added loss, order, 25%", 256),
            ("accuracy, 0 %", "perturbation", "accuracy, order, 0%", 256),
            ("accuracy, 5 %", "perturbation", "accuracy, order, 5%", 256),
        ],
        "Reproduced",
        "",
    ),
    Claim(
        "Order, positions and rotary features are tolerated alike",
        "alike",
        [
            ("order over positions, 5 %", "perturbation", "added loss, order over index, 5%, error over draws", 256),
            ("25 %", "perturbation", "added loss, order over index, 25%, error over draws", 256),
            (
                "features over positions, 5 %",
                "perturbation",
                "added loss, feature over index, 5%, error over draws",
                256,
            ),
            ("25 %", "perturbation", "added loss, feature over index, 25%, error over draws", 256),
        ],
        "Not",
        "Features cost less than positions.",
    ),
    Claim(
        "Limited distances keep outputs in the region of training, so models read longer texts",
        "seen in figures",
        [
            ("loss beyond 8192 tokens, plain", "remedies", "loss beyond the training length, plain", 12288),
            (
                "distances at most 8191",
                "remedies",
                "loss beyond the training length, distances within the training length",
                12288,
            ),
            (
                "window of 4096 and 4 sinks",
                "remedies",
                "loss beyond the training length, half of it and 4 sinks",
                12288,
            ),
            (
                "outputs outside the region, plain",
                "remedies",
                "outputs outside beyond the training length, plain",
                12288,
            ),
        ],
        "In part",
        "Limits help, but outputs are in that region without them, too.",
    ),
]

CLAIMS_B: list[SyntheticClaim] = []

FINDINGS = [
    Finding(
        "**Additivity is learned**, by the profile of other texts",
        [
            ("*r* held out, trained", "additive", "r_held_out, trained", 256),
            ("random weights", "additive", "r_held_out, random", 256),
            ("shuffled weights", "additive", "r_held_out, shuffled", 256),
            ("random queries and keys", "additive", "r_held_out, random queries and keys", 256),
            ("share of layers above random and shuffled", "additive", "share of layers above both copies", 256),
        ],
        "",
    ),
    Finding(
        "**… but not which keys a head pairs its queries with**: queries and keys are each concentrated",
        [
            ("*r* held out, own", "additive", "r_held_out, trained", 256),
            ("foreign keys", "additive", "r_held_out, foreign keys", 256),
            ("turned", "additive", "r_held_out, turned", 256),
            ("share of heads below foreign keys", "additive", "share of heads below foreign keys", 256),
        ],
        "",
    ),
    Finding(
        "**What is not additive finds the heads that match content**, from ordinary text",
        [
            ("AUC for induction heads: pairing", "pairing", "AUC for induction: pairing", 256),
            ("1 − *r*", "pairing", "AUC for induction: 1 - r", 256),
            ("low entropy", "pairing", "AUC for induction: low entropy", 256),
            ("pairing, 1024 tokens", "pairing", "AUC for induction: pairing", 1024),
            ("low entropy, 1024 tokens", "pairing", "AUC for induction: low entropy", 1024),
            ("pairing, among sharp heads", "pairing", "AUC for induction: pairing, sharp heads alone", 256),
            ("pairing, shuffled text", "pairing", "AUC for induction: pairing, shuffled texts", 256),
            ("1 − *r*, shuffled text", "pairing", "AUC for induction: 1 - r, shuffled texts", 256),
            ("pairing, random weights", "pairing", "AUC for induction: pairing, random weights", 256),
            ("AUC for retrieval heads: pairing", "pairing", "AUC for retrieval: pairing", 256),
            ("low entropy", "pairing", "AUC for retrieval: low entropy", 256),
        ],
        "",
    ),
    Finding(
        "**Wrong distances cost more than most of what attention adds**",
        [
            ("loss", "fixed_distance", "loss", 256),
            ("added by every distance 5", "fixed_distance", "added loss, every distance 5", 256),
            ("by shuffled positions", "fixed_distance", "added loss, shuffled positions", 256),
            ("by even positions alone", "fixed_distance", "added loss, positions rounded to even numbers", 256),
        ],
        "",
    ),
    Finding(
        "**How far a model must tell distances apart depends on the text**: no one number",
        [
            ("added by distances at most 16", "ceilings", "added loss, distances at most 16, prose", 256),
            ("second half of 1024 tokens", "ceilings", "added loss, distances at most 16, prose, second half", 1024),
            ("second copy of a passage", "ceilings", "added loss, distances at most 16, second copy of a passage", 255),
            ("of random tokens", "ceilings", "added loss, distances at most 16, second copy of random tokens", 255),
            (
                "by at most 64, second half of 1024",
                "ceilings",
                "added loss, distances at most 64, prose, second half",
                1024,
            ),
        ],
        "",
    ),
    Finding(
        "**Positional work is spread over layers**",
        [
            (
                "share of what single layers restore: first third",
                "layers",
                "share of restored, first third of the layers",
                256,
            ),
            ("second third", "layers", "share of restored, second third of the layers", 256),
            ("last third", "layers", "share of restored, last third of the layers", 256),
            ("layer with most", "layers", "share of restored, layer with most", 256),
        ],
        "",
    ),
    Finding(
        "**A few heads are not enough**",
        [
            ("added by every distance 5", "sets", "added loss, all heads", 256),
            ("given back by 16 heads, curvature", "sets", "nats given back by 16 heads of largest curvature", 256),
            ("16 of a search", "sets", "nats given back by 16 heads of a greedy search", 256),
            ("4 of a search", "sets", "nats given back by 4 heads of a greedy search", 256),
            ("16 random heads", "sets", "nats given back by 16 random heads", 256),
        ],
        "",
    ),
    Finding(
        "**Attention without the query keeps little; near pairs keep most**",
        [
            (
                "kept by static attention, fitted to other texts",
                "rungs",
                "attention kept, static, fitted to other texts",
                256,
            ),
            (
                "own attention, last 8 keys and the first token",
                "rungs",
                "attention kept, own in a window of 8 and the first token",
                256,
            ),
            ("last 32", "rungs", "attention kept, own in a window of 32 and the first token", 256),
            ("banded, fitted to the text itself", "rungs", "attention kept, banded, fitted to the predicted text", 256),
        ],
        "",
    ),
]

CLOSING = {"A": "## Claims of [B]", "B": "## Findings", "findings": "## One command"}
