"""What the page of results says: each claim of the two papers, and each finding. ``tables/results_page.csv`` names the
numbers that they rest on: rows of the tables of studies, by study, name and length of the texts."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["Reproduced", "Partly reproduced", "Not reproduced"]


class Claim(NamedTuple):
    """A claim of [A], and whether it holds here."""

    claim: str
    paper: str
    status: Status
    why: str


class SyntheticClaim(NamedTuple):
    """A claim of [B] about models that are trained on a synthetic task; ``{study: row}`` is a number of their table."""

    claim: str
    paper: str
    here: str
    status: Status
    why: str


class Finding(NamedTuple):
    """A finding of our own, and what was tried in order to refute it."""

    finding: str
    attack: str


OPENING = """# Results

What the two papers claim beside what we measure, and what we find ourselves, with what was tried to refute it.

[A] is Han and Ji, [arXiv 2503.13305](https://arxiv.org/abs/2503.13305); [B] is Gu et al., [arXiv
2505.13027](https://arxiv.org/abs/2505.13027). *Models*: SmolLM2-135M-Instruct (30 layers of 9 heads) and Gemma 3 270M
(18 layers of 4 heads, five in six with a window of 512 tokens), both with 4-bit weights. *Texts* have 256 tokens
unless a row says otherwise; columns without a model are SmolLM2's, Gemma reads speeches. *Rows*: … repeats the
beginning of a row above, – was not measured, ± is a standard error over texts or over what the row names. *Random*
weights have the standard deviation of the model's configuration. No number is corrected for multiple comparisons.
`docs/studies/tables` has every number with its number of texts, two to eight; `make findings` measures the column
*demo*, of the demo text, in a clone (tens of minutes).

## Claims of [A]"""


CLAIMS_A = [
    Claim(
        "Scores are nearly a sum of a position part and a content part",
        "0.959",
        "Partly reproduced",
        "The paper's figure lies between the two sums.",
    ),
    Claim(
        "They are so in all layers and heads",
        "all",
        "Not reproduced",
        "More than half of the heads are below 0.9.",
    ),
    Claim(
        "Random initialisation is far from it",
        "far lower",
        "Partly reproduced",
        "At the standard deviation of the configuration (SmolLM2 1/24, Gemma 0.02). A random copy of 0.02 is nearly as "
        "additive as SmolLM2.",
    ),
    Claim(
        "At a dummy distance the key component stays as it is",
        "stays",
        "Partly reproduced",
        "At distance 64, but next to the query hardly more than with random weights.",
    ),
    Claim(
        "At a dummy distance the scores move by the distance component",
        "shift",
        "Partly reproduced",
        "They move by most of the component from distance 16 on, by less below. So do those of random weights.",
    ),
    Claim(
        "Observation 1: keys are alike in fast subspaces, content is in slow ones",
        "seen in figures",
        "Partly reproduced",
        "In SmolLM2 both halves are learned. In Gemma slow subspaces hold less of the content's variance than with "
        "random weights.",
    ),
    Claim(
        "Theorem 2: the spread of keys bounds the interaction",
        "a proof",
        "Reproduced",
        "The bound by each subspace alone is far from the interaction.",
    ),
    Claim(
        "Rotating subspaces can represent any function of the distance",
        "any",
        "Not reproduced",
        "Smooth functions only, with coefficients of moderate size.",
    ),
    Claim(
        "Up to 5 % of the words out of place cost little",
        "little",
        "Reproduced",
        "Accuracy falls by a tenth or less. Questions have two answers; with all neighbours exchanged most are right.",
    ),
    Claim(
        "Order, positions and rotary features are tolerated alike",
        "alike",
        "Not reproduced",
        "Features cost least. Order costs more than positions, but on WikiText by less than the error over texts.",
    ),
    Claim(
        "More additive scores tolerate more",
        "an explanation",
        "Not reproduced",
        "The opposite: more additive layers and heads cost more, less clearly given the cost of distance 5.",
    ),
    Claim(
        "In long texts scores depend on content, not on distance",
        "an explanation",
        "Partly reproduced",
        "The share of the distance falls mostly within 512 tokens, and remains four times that of random weights.",
    ),
    Claim(
        "Beyond the training length outputs leave the region of training; limited distances keep them in it",
        "seen in figures",
        "Partly reproduced",
        "A direction (fitted to other texts, in the layer where it does best) separates outputs beyond the training "
        "length better than a doubling within it. A Λ-mask undoes that in the small models, limited distances do not.",
    ),
]


def margins(case: str) -> str:
    return ", ".join(f"{{margins: margin in thousandths, layer {layer}, {case}}}" for layer in range(3))


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
        "12 heads: drops 0.65 and 0.48. 96 heads: 9 of 34 models have one necessary head zeroed (0.13 to 0.44), 5 by "
        "mean ablation",
        "Partly reproduced",
        "In a quarter of the models; in layer 0 it costs at most 0.20.",
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
        "0.94 and 0.97, none 0.82; rotation alone 0.64 and 0.73",
        "Reproduced",
        "For the paper's RoPE, which has sinusoidal positions, too.",
    ),
    SyntheticClaim(
        "Counting (task 2) shows no deposit; MLA is best, then no positions, RoPE, ALiBi",
        "0.97; 0.78; 0.69; worst",
        "0.71, 0.53, 0.74, 0.53; 9 to 10 effective heads of 12",
        "Partly reproduced",
        "No deposit, but another order.",
    ),
    SyntheticClaim(
        "A RoPE head's expected positional gradient at initialisation is bounded away from 0 (proposition 6.1)",
        "a proof",
        "share of heads above two errors {initial: share of heads above two errors, encoding, RoPE}, with shuffled "
        "labels {initial: share of heads above two errors, encoding, RoPE, shuffled labels}",
        "Partly reproduced",
        "In most heads, but in half of them with labels that do not depend on the text, too.",
    ),
    SyntheticClaim(
        "Under ALiBi the gradients of a batch cancel (proposition 6.2)",
        "a proof",
        "left of the mean norm {initial: expected over mean norm, encoding, ALiBi}, with shuffled labels "
        "{initial: expected over mean norm, encoding, ALiBi, shuffled labels}; RoPE "
        "{initial: expected over mean norm, encoding, RoPE}",
        "Partly reproduced",
        "Less is left than under RoPE, and little more than with shuffled labels.",
    ),
    SyntheticClaim(
        "The margin of the leading head over the second grows from each layer to the one below (theorem 6.1)",
        "a proof",
        f"layers 0, 1, 2, in thousandths: step 100 {margins('RoPE, step 100')}, without positions "
        f"{margins('no positions, step 100')}. Each exceeds the next in two of four seeds (by chance "
        "1 in 6)",
        "Partly reproduced",
        "On average in training, in half of the seeds, and in models that fail at the task.",
    ),
    SyntheticClaim(
        "Biases add a function of the distance to the scores; RoPE multiplies content by one",
        "equations",
        "share of the scores that depends on the distance: ALiBi {toeplitz: toeplitz, scores, ALiBi, trained}, RoPE "
        "{toeplitz: toeplitz, scores, RoPE, trained}, without its rotation "
        "{toeplitz: toeplitz, scores before rotation, RoPE, trained}, no positions "
        "{toeplitz: toeplitz, scores, no positions, trained}. Untrained ALiBi "
        "{toeplitz: toeplitz, scores, ALiBi, untrained}, RoPE {toeplitz: toeplitz, scores, RoPE, untrained}",
        "Reproduced",
        "By construction for biases. With RoPE the share is learned, and small.",
    ),
    SyntheticClaim(
        "In a hybrid of absolute positions and RoPE the positional directions are displaced after layer 2",
        "seen in figures",
        "largest of four principal angles before layer 3, in degrees: hybrid "
        "{angles: largest of four angles before layer 3, hybrid, trained}, absolute alone "
        "{angles: largest of four angles before layer 3, absolute, trained}; untrained "
        "{angles: largest of four angles before layer 3, hybrid, untrained} and "
        "{angles: largest of four angles before layer 3, absolute, untrained}",
        "Reproduced",
        "Early: {displaced: largest of 4 angles before layer 3, hybrid, step 50} in two hybrids at an accuracy of "
        "{displaced: accuracy, hybrid, step 50}, which absolute positions exceed.",
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
        "**Sixteen exact distances and one far distance (255) cost 0.2 nats or less in prose and copied passages.** A "
        "copy of 511 random tokens costs SmolLM2 2.3, at 767 0.45 ± 0.36. Much of what a limit costs in long texts and "
        "copies is place: it remains where far keys keep their order in 16 to 64",
        "Longer texts; copies; another far distance; far keys near, but in their order. In 256 tokens of prose a limit "
        "costs SmolLM2 as much as one far distance. At 768 Gemma fails, whose local layers have a window of 512. One "
        "far distance is the idea of ReRoPE, a limit that of LM-Infinite ([arXiv "
        "2308.16137](https://arxiv.org/abs/2308.16137)).",
    ),
    Finding(
        "**Additivity is learned.** With the distance component of other texts, trained scores are more additive than "
        "with random weights of the configuration or shuffled ones, in every layer",
        "Other texts' distance components; shuffled weights; random queries and keys of the same residual stream. At a "
        "standard deviation of 0.02, *r* of one text hardly separates random weights (claim 3).",
    ),
    Finding(
        "**It is concentration: queries and keys that never meet are as additive.** Means and covariances of a head's "
        "queries and keys find induction heads as well as its scores",
        "Keys of another text keep the distributions and no pair; a normal distribution keeps means and covariances. "
        "Other heads' keys (in Gemma another layer's) do not find induction heads. ± of AUC from a bootstrap over "
        "heads.",
    ),
    Finding(
        "**With every distance at 5, the loss is no lower than with constant outputs**",
        "The cost depends on the distance: at 0 SmolLM2 does better than with constant outputs, by 0.2 to 0.6, and "
        "Gemma as well as with them. On WikiText the difference at 5 is within the errors.",
    ),
    Finding(
        "**Beyond its training length SmolLM2 fails late, not at once**",
        "The same tokens at earlier positions; three texts, one model.",
    ),
]

TRAINED = "trained"
CONTROLS = ("random", "random of 0.02", "shuffled", "random queries and keys")
"""How the last part of a row's name says of which weights it is."""

TWO_AT_ONCE = {
    "16 exact, others 16,": ("16 exact, others 255,", "16 exact, others in 16 to 64,"),  # resolution and place
}
"""Parts of the names of rows whose intervention changes two things at once, and of those that change one."""

HEADINGS = {
    "B": "## Claims of [B]\n\nAccuracies and drops of small models, with intervals on the page [positional "
    "deposit](deposit.md). *Shuffled labels* do not depend on the text. ± is over two to five seeds, of angles over "
    "seven and nine models.",
    "findings": "## Findings",
}
