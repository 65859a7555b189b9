"""What the page of results says: each claim of the two papers, each finding, and the numbers that it rests on."""

from __future__ import annotations

from typing import Literal, NamedTuple

Line = tuple[str, str, str, int]  # what is measured; study, row and length of the texts in the tables
Status = Literal["Reproduced", "Partly reproduced", "Not reproduced", "Not tested"]


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

What the two papers claim beside what we measure, and what we find ourselves. A finding stands here only if it survived
an attempt to refute it, which is named below its numbers.

[A] is Han and Ji, [arXiv 2503.13305](https://arxiv.org/abs/2503.13305); [B] is Gu et al., [arXiv
2505.13027](https://arxiv.org/abs/2505.13027). *Models*: SmolLM2-135M-Instruct (30 layers of 9 heads) and Gemma 3 270M
(18 layers of 4 heads, five in six with a window of 512 tokens), both with 4-bit weights. *Texts*: eight of 256 tokens
unless a row says otherwise, four of 1024, fewer of the demo text. *Rows*: … repeats the beginning of a row above, – was
not measured, ± is a standard error over texts or over what the row names. *Random* weights have the standard deviation
of the model's configuration; `additivity` defines the other controls. `docs/findings/tables` has every number, with the
call that gives it.

`make findings` measures the column *demo text* in a clone, in 13 minutes (`docs/findings/__main__.py`). No number is
corrected for multiple comparisons.

## Claims of [A]"""


def keys_at(label: str, row: str) -> Line:
    return label, "key_component", f"key component, {row}", 256


def shift(label: str, row: str) -> Line:
    return label, "key_component", f"mean score at a distance and distance component, distances, {row}", 256


CLAIMS_A = [
    Claim(
        "Scores are nearly a sum of a position part and a content part",
        "0.959",
        [
            ("*r*, three-axis sum (the paper's table)", "controlled", "r_three_axis, trained", 256),
            ("*r*, two-axis sum (its equation)", "controlled", "r_two_axis, trained", 256),
        ],
        "Partly reproduced",
        "The paper's figure lies between the two sums.",
    ),
    Claim(
        "They are so in all layers and heads",
        "all",
        [
            ("*r*, three-axis, lowest layer", "controlled", "r_three_axis, lowest layer, trained", 256),
            ("share of heads above 0.9", "controlled", "share of heads with r_three_axis above .9, trained", 256),
        ],
        "Not reproduced",
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
            keys_at("correlation of the own key component with that at distance 64", "own and distance 64, trained"),
            keys_at("… at distance 1", "own and distance 1, trained"),
            keys_at("… at distance 64, random weights", "own and distance 64, random"),
        ],
        "Partly reproduced",
        "At far distances only: next to the query not more than with random weights.",
    ),
    Claim(
        "At a dummy distance the scores move by the distance component",
        "shift",
        [
            shift("mean score at a distance against the component: correlation", "correlation, trained"),
            shift("… slope", "slope, trained"),
            shift("… correlation, random weights", "correlation, random"),
        ],
        "Partly reproduced",
        "They move by two thirds as much; with random weights even more closely.",
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
            ("… random weights", "subspaces", "key_concentration, wavelengths below 16, random", 256),
            ("share of content, wavelengths above 4096", "subspaces", "semantic, wavelengths above 4096, trained", 256),
            ("… random weights", "subspaces", "semantic, wavelengths above 4096, random", 256),
        ],
        "Partly reproduced",
        "Content is in slow subspaces without training, too.",
    ),
    Claim(
        "Theorem 2: the spread of keys bounds the interaction",
        "a proof",
        [
            ("interaction distance:key", "bound", "distance:key, share, trained", 256),
            ("bound by pairs of subspaces", "bound", "distance:key, pairwise, trained", 256),
            ("bound by each subspace alone", "bound", "distance:key, separate, trained", 256),
            ("share of heads in which both bounds hold", "bound", "distance:key, valid, trained", 256),
        ],
        "Reproduced",
        "The bound by each subspace alone is far from the interaction.",
    ),
    Claim(
        "Rotating subspaces can represent any function of the distance",
        "any",
        [
            ("r² of −log(1 + d)", "capacity", "r2 of -log(1 + d)", 450),
            ("r² of d = 1", "capacity", "r2 of d = 1", 450),
        ],
        "Not reproduced",
        "Smooth functions only, with coefficients of moderate size.",
    ),
    Claim(
        "Up to 5 % of the words out of place cost little",
        "little",
        [
            ("loss added by order, 5 %", "perturbation", "added loss, order, 5%", 256),
            ("loss added by order, 25 %", "perturbation", "added loss, order, 25%", 256),
            ("accuracy, order, 0 %", "perturbation", "accuracy, order, 0%", 256),
            ("accuracy, order, 5 %", "perturbation", "accuracy, order, 5%", 256),
            ("questions right, order, 10 %", "questions", "right, order, 10%", 0),
            ("questions right, order, 100 %", "questions", "right, order, 100%", 0),
        ],
        "Reproduced",
        "At 5 % accuracy falls by a tenth or less. Most questions need no order.",
    ),
    Claim(
        "Order, positions and rotary features are tolerated alike",
        "alike",
        [
            (
                "loss added by order over that by positions, 5 %",
                "perturbation",
                "added loss, order over index, 5%, error over draws",
                256,
            ),
            (
                "loss added by features over that by positions, 5 %",
                "perturbation",
                "added loss, feature over index, 5%, error over draws",
                256,
            ),
        ],
        "Not reproduced",
        "Order costs most, features least.",
    ),
    Claim(
        "Limited distances keep outputs in the region of training",
        "seen in figures",
        [
            ("loss beyond 8192 tokens", "remedies", "loss beyond the training length, plain", 12288),
            (
                "… distances at most 8191",
                "remedies",
                "loss beyond the training length, distances within the training length",
                12288,
            ),
            (
                "… window of 4096 and 4 sinks",
                "remedies",
                "loss beyond the training length, half of it and 4 sinks",
                12288,
            ),
            (
                "share of outputs outside the region",
                "remedies",
                "outputs outside beyond the training length, plain",
                12288,
            ),
        ],
        "Partly reproduced",
        "Limits help, but outputs are in that region without them, too.",
    ),
]

CLAIMS_B = [
    SyntheticClaim(
        "RoPE learns the distance of two triggers (task 1), absolute positions are second, ALiBi and no positions fail",
        "0.93; second; fail",
        "1.00, 0.82, 0.18, 0.17; at the paper's size 0.87",
        "Partly reproduced",
        "All but the second place, which MLA has (0.97).",
    ),
    SyntheticClaim(
        "RoPE deposits this work in one early head, and no other head matters",
        "drop 0.60 in layer 0",
        "12 heads: drops 0.65 and 0.48. 96 heads: 9 of 34 models have one necessary head zeroed, 5 by mean ablation",
        "Partly reproduced",
        "Such a head is the exception, and in layer 0 it costs at most 0.20.",
    ),
    SyntheticClaim(
        "MLA shows no deposit",
        "none",
        "drops 0.61 and 0.45 (RoPE 0.65 and 0.48); without positions 0.72 and 0.43 (RoPE 0.69 and 0.55)",
        "Not reproduced",
        "As uneven as RoPE.",
    ),
    SyntheticClaim(
        "One or two rotary heads of 16 nearly suffice",
        "about 0.90; more than 0.90",
        "0.94 and 0.97; rotation alone 0.64 and 0.73",
        "Reproduced",
        "For the paper's RoPE, which has sinusoidal positions, too.",
    ),
    SyntheticClaim(
        "Counting (task 2) shows no deposit; MLA is best, then no positions, RoPE, ALiBi",
        "0.97; 0.78; 0.69; worst",
        "0.71, 0.53, 0.74, 0.53; 9 to 10 effective heads of 12. At the paper's size 0.34, largest drop 0.08",
        "Partly reproduced",
        "No deposit, but another order.",
    ),
    SyntheticClaim(
        "Other tasks with positions",
        "not tested",
        "Reversal: absolute positions 1.00, RoPE 0.33. Brackets: RoPE 1.00 and 0.95, five to seven effective heads of "
        "12",
        "Not reproduced",
        "No deposit with RoPE.",
    ),
    SyntheticClaim(
        "A deposit goes with worse length extrapolation",
        "hypothesis",
        "rank correlation of 44 models +0.41 (0.10 to 0.65) zeroed, −0.05 (−0.40 to 0.27) by mean ablation",
        "Not reproduced",
        "The encoding decides: rotation 0.91, with sinusoidal positions 0.32.",
    ),
]


FINDINGS = [
    Finding(
        "**Additivity is learned.** With the distance component of other texts, trained scores are more additive than "
        "any with redrawn weights, in every layer",
        [
            ("*r* held out, trained", "additive", "r_held_out, trained", 256),
            ("… random weights", "additive", "r_held_out, random", 256),
            ("… shuffled weights", "additive", "r_held_out, shuffled", 256),
            ("… random queries and keys", "additive", "r_held_out, random queries and keys", 256),
            ("share of layers above random and shuffled", "additive", "share of layers above both copies", 256),
        ],
        "Without the first token (0.88 in SmolLM2), without query means (0.86); five copies of each. At a standard "
        "deviation of 0.02 *r* of one text does not separate them.",
    ),
    Finding(
        "**It is mostly concentration, not pairing.** Scores of queries with keys that their head never meets are "
        "about as additive",
        [
            ("*r* held out, own", "additive", "r_held_out, trained", 256),
            ("… foreign keys", "additive", "r_held_out, foreign keys", 256),
            ("share of heads below foreign keys", "additive", "share of heads below foreign keys", 256),
        ],
        "It refutes that a head computes a sum: queries and keys are each close to a mean. In Gemma foreign keys are "
        "another layer's.",
    ),
    Finding(
        "**With every distance at 5, a model does no better than with constant outputs**",
        [
            ("loss", "fixed_distance", "loss", 256),
            ("loss with mean outputs", "rungs", "loss, mean outputs", 256),
            ("loss added by every distance 5", "fixed_distance", "added loss, every distance 5", 256),
            ("… by every distance 0", "fixed_distance", "added loss, every distance 0", 256),
            ("… by every distance 50", "fixed_distance", "added loss, every distance 50", 256),
            ("… by shuffled positions", "fixed_distance", "added loss, shuffled positions", 256),
        ],
        "The cost depends on the distance: at 0, the loss of SmolLM2 is 0.2 to 0.5 below that with constant outputs, "
        "with errors of about 0.2, and Gemma's is the same. On WikiText the difference at 5 is within the errors.",
    ),
    Finding(
        "**How far a model must tell distances apart depends on the text**: there is no one range",
        [
            (
                "loss added by distances at most 16: prose, 256 tokens",
                "ceilings",
                "added loss, distances at most 16, prose",
                256,
            ),
            ("… second half of 1024 tokens", "ceilings", "added loss, distances at most 16, prose, second half", 1024),
            (
                "… second copy of a passage",
                "ceilings",
                "added loss, distances at most 16, second copy of a passage",
                255,
            ),
            (
                "… second copy of random tokens",
                "ceilings",
                "added loss, distances at most 16, second copy of random tokens",
                255,
            ),
            (
                "loss added by distances at most 64: prose, 256 tokens",
                "ceilings",
                "added loss, distances at most 64, prose",
                256,
            ),
            (
                "… second copy of random tokens",
                "ceilings",
                "added loss, distances at most 64, second copy of random tokens",
                255,
            ),
        ],
        "The other rows: 256 tokens of prose alone said that 16 to 32 distances are enough.",
    ),
    Finding(
        "**Which layers use distances differs between models**: the first two thirds in SmolLM2, mostly the "
        "first in Gemma",
        [
            (
                "share of what single layers restore: first third",
                "layers",
                "share of restored, first third of the layers",
                256,
            ),
            ("… second third", "layers", "share of restored, second third of the layers", 256),
            ("… last third", "layers", "share of restored, last third of the layers", 256),
            (
                "share of what single layers cost, changed alone: first third",
                "layers",
                "share of alone, first third of the layers",
                256,
            ),
            (
                "sum of the costs of single layers over the cost of all",
                "layers",
                "costs of single layers over the cost of all",
                256,
            ),
        ],
        "Restoring a layer where all others have distance 5, beside changing it alone. Shares in SmolLM2 depend on the "
        "text.",
    ),
    Finding(
        "**A few heads are not enough** to give distances back",
        [
            ("loss added by every distance 5", "sets", "added loss, all heads", 256),
            (
                "nats given back by 16 heads of largest curvature",
                "sets",
                "nats given back by 16 heads of largest curvature",
                256,
            ),
            ("… by 16 heads of a greedy search", "sets", "nats given back by 16 heads of a greedy search", 256),
            ("… by 16 random heads", "sets", "nats given back by 16 random heads", 256),
            (
                "… by mean outputs of the 16, by curvature",
                "sets",
                "nats given back by 16 heads of largest curvature, mean outputs instead",
                256,
            ),
        ],
        "A search in place of a ranking, chosen on other texts; five random sets.",
    ),
    Finding(
        "**Most of attention is what a head does with near keys.** A window keeps as much as an additive fit of the "
        "text itself. Attention without the query keeps a quarter to a half",
        [
            (
                "attention kept: own, last 8 keys and the first token",
                "rungs",
                "attention kept, own in a window of 8 and the first token",
                256,
            ),
            (
                "… own, last 32 keys and the first token",
                "rungs",
                "attention kept, own in a window of 32 and the first token",
                256,
            ),
            (
                "… banded, fitted to the text itself",
                "rungs",
                "attention kept, banded, fitted to the predicted text",
                256,
            ),
            ("… static, fitted to other texts", "rungs", "attention kept, static, fitted to other texts", 256),
        ],
        "The window has no parameters. Relative to mean outputs; ± of fits over blocks of the texts.",
    ),
    Finding(
        "**Beyond its training length a model fails late, not at once**",
        [
            ("loss added by the position, 8192 to 9728", "beyond", "loss added by the position, 8192 to 9728", 11264),
            ("… 9728 to 10 240", "beyond", "loss added by the position, 9728 to 10240", 11264),
            ("… 10 240 to 10 752", "beyond", "loss added by the position, 10240 to 10752", 11264),
            ("… 10 752 to 11 264", "beyond", "loss added by the position, 10752 to 11264", 11264),
        ],
        "The same tokens at earlier positions; three texts, one model.",
    ),
]

HEADINGS = {
    "B": "## Claims of [B]\n\nAccuracies and drops of small models; seeds and intervals are on the page "
    "[positional deposit](deposit.md).",
    "findings": "## Findings",
}
