"""What the page of results says: each claim of the two papers, and each finding. ``tables/results_page.csv`` names the
numbers that they rest on: rows of the tables of studies, by study, name and length of the texts."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["Reproduced", "Partly reproduced", "Not reproduced", "New"]


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

What the two papers claim beside what we measure, and what we find ourselves. A finding stands here only if it survived
an attempt to refute it, which is named below its numbers.

[A] is Han and Ji, [arXiv 2503.13305](https://arxiv.org/abs/2503.13305); [B] is Gu et al., [arXiv
2505.13027](https://arxiv.org/abs/2505.13027). *Models*: SmolLM2-135M-Instruct (30 layers of 9 heads) and Gemma 3 270M
(18 layers of 4 heads, five in six with a window of 512 tokens), both with 4-bit weights. Two small models stand in one
claim. *Texts*: of 256 tokens unless a row says otherwise; two to eight of 256, two to four of 1024, two of 2048. An
error over two texts is unreliable. *Rows*: … repeats the beginning of a row above, – was not measured, ± is a standard
error over texts or over what the row names. *Random* weights have the standard deviation of the model's configuration;
`additivity` defines the other controls. *How numbers are made*: a sentence that names a baseline has its row at the
same setting (distance, length, text), and an intervention that changes two things at once has the control that changes
one. `docs/studies/tables` has every number, with the number of texts and the call that gives it.

`make findings` measures the column *demo text* in a clone (tens of minutes). No number is
corrected for multiple comparisons.

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
        "The lowest layer is far below the mean, and more than half of the heads are below 0.9.",
    ),
    Claim(
        "Random initialisation is far from it",
        "far lower",
        "Partly reproduced",
        "At the standard deviation of the configuration. A random copy of 0.02 is nearly as additive as SmolLM2, and "
        "the two-axis sum separates less.",
    ),
    Claim(
        "At a dummy distance the key component stays as it is",
        "stays",
        "Partly reproduced",
        "At distance 64, but not next to the query: there it is little above random weights, on the demo text below.",
    ),
    Claim(
        "At a dummy distance the scores move by the distance component",
        "shift",
        "Partly reproduced",
        "In the median head they follow the component closely, and move by 0.86 to 0.95 of it from distance 16 on, by "
        "0.58 to 0.74 below. Random weights do so, too.",
    ),
    Claim(
        "Observation 1: keys are alike in fast subspaces, content is in slow ones",
        "seen in figures",
        "Partly reproduced",
        "In SmolLM2 both halves are learned: without training, slow subspaces hold less of the content, and of "
        "\\|q\\| \\|k\\| as much as their number. In Gemma slow subspaces hold less of the content's variance than "
        "with random weights.",
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
        "At 5 % accuracy falls by a tenth or less, at 25 % by up to two fifths. Questions have two answers (chance "
        "0.5); with all neighbours exchanged most are right.",
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
        "The opposite: more additive layers and heads cost more. Given the cost of distance 5, 0.36 of 0.58 is left "
        "for layers (p = 0.06), 0.14 of 0.44 for heads (p = 0.012).",
    ),
    Claim(
        "In long texts scores depend on content, not on distance",
        "an explanation",
        "Partly reproduced",
        "The share of the distance falls mostly within 512 tokens, and remains four times that of random weights. "
        "Ranges of equal width; queries and keys of texts of 256 tokens.",
    ),
    Claim(
        "Beyond the training length outputs leave the region of training; limited distances keep them in it",
        "seen in figures",
        "Partly reproduced",
        "A direction separates outputs beyond the training length better than a doubling within it does: 16 texts of "
        "the demo and the [story model](length_generalization.md#attention-outputs), eight of SmolLM2. A Λ-mask undoes "
        "that (not measured in SmolLM2). Limited distances do not in the demo model, though they cost 0.02 nats. "
        "Losses are of one text.",
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
        "mean ablation; 11 and 7 by loss. With eight distances 5 of 10 zeroed, else 4 of 24 (p = 0.08)",
        "Partly reproduced",
        "Of 34 models 5 to 11 have one, by ablation and measure; in layer 0 it costs at most 0.20.",
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
        "0.71, 0.53, 0.74, 0.53; 9 to 10 effective heads of 12. At the paper's size 0.34, largest drop 0.08",
        "Partly reproduced",
        "No deposit, but another order.",
    ),
    SyntheticClaim(
        "A RoPE head's expected positional gradient at initialisation is bounded away from 0 (proposition 6.1)",
        "a proof",
        "share of heads above two errors {initial: share of heads above two errors, encoding, RoPE}, with shuffled "
        "labels {initial: share of heads above two errors, encoding, RoPE, shuffled labels}. For a distance profile "
        "{initial: share of heads above two errors, distance, RoPE}, without positions "
        "{initial: share of heads above two errors, distance, no positions}",
        "Partly reproduced",
        "In most heads, but labels that do not depend on the text give three quarters of its norm.",
    ),
    SyntheticClaim(
        "Under ALiBi the gradients of a batch cancel (proposition 6.2)",
        "a proof",
        "left of the mean norm {initial: expected over mean norm, encoding, ALiBi}, with shuffled labels "
        "{initial: expected over mean norm, encoding, ALiBi, shuffled labels}; RoPE "
        "{initial: expected over mean norm, encoding, RoPE}. For a distance profile "
        "{initial: expected over mean norm, distance, ALiBi}, RoPE {initial: expected over mean norm, distance, RoPE}, "
        "without positions {initial: expected over mean norm, distance, no positions}",
        "Partly reproduced",
        "Less is left than under RoPE, but as much beyond shuffled labels; of a distance profile as much.",
    ),
    SyntheticClaim(
        "The margin of the leading head over the second grows from each layer to the one below (theorem 6.1)",
        "a proof",
        f"layers 0, 1, 2, in thousandths: untrained {margins('RoPE, step 0')}; step 100 {margins('RoPE, step 100')}, "
        f"without positions {margins('no positions, step 100')}; step 300 {margins('RoPE, step 300')}, with ALiBi "
        f"{margins('ALiBi, step 300')}. Each exceeds the next in two of four seeds at steps 100 and 300 "
        "(by chance 1 in 6)",
        "Partly reproduced",
        "On average in training, in half of the seeds; and as much in models that fail at the task.",
    ),
    SyntheticClaim(
        "The head with the largest positional gradient in training has the largest drop at the end",
        "–",
        "RoPE: in four of four seeds at step 100, two at steps 50 and 300, one at step 0 (by chance 1 in 12)",
        "New",
        "Step 100 was chosen with the first seed.",
    ),
    SyntheticClaim(
        "Biases add a function of the distance to the scores; RoPE multiplies content by one",
        "equations",
        "share of the scores that depends on the distance: ALiBi {toeplitz: toeplitz, scores, ALiBi, trained}, T5 "
        "{toeplitz: toeplitz, scores, T5, trained}, RoPE {toeplitz: toeplitz, scores, RoPE, trained}, without its "
        "rotation {toeplitz: toeplitz, scores before rotation, RoPE, trained}, absolute "
        "{toeplitz: toeplitz, scores, absolute, trained}, no positions "
        "{toeplitz: toeplitz, scores, no positions, trained}. Untrained ALiBi "
        "{toeplitz: toeplitz, scores, ALiBi, untrained}, RoPE {toeplitz: toeplitz, scores, RoPE, untrained}, absolute "
        "{toeplitz: toeplitz, scores, absolute, untrained}",
        "Reproduced",
        "By construction for biases. With RoPE the share is learned, and small.",
    ),
    SyntheticClaim(
        "T5's relative bias on task 1",
        "–",
        "{accuracy: accuracy, T5}; no positions {accuracy: accuracy, no positions}, RoPE {accuracy: accuracy, RoPE}",
        "New",
        "It fails, like ALiBi.",
    ),
    SyntheticClaim(
        "In a hybrid of absolute positions and RoPE the positional directions are displaced after layer 2",
        "seen in figures",
        "largest and second of four principal angles before layer 3, in degrees: hybrid "
        "{angles: largest of four angles before layer 3, hybrid, trained} and "
        "{angles: second of four angles before layer 3, hybrid, trained}, absolute alone "
        "{angles: largest of four angles before layer 3, absolute, trained} and "
        "{angles: second of four angles before layer 3, absolute, trained}; largest untrained "
        "{angles: largest of four angles before layer 3, hybrid, untrained} and "
        "{angles: largest of four angles before layer 3, absolute, untrained}, before layer 1 "
        "{angles: largest of four angles before layer 1, hybrid, trained} and "
        "{angles: largest of four angles before layer 1, absolute, trained}",
        "Reproduced",
        "Most of it before layer 1, and early: {displaced: largest of 4 angles before layer 3, hybrid, step 50} in two "
        "hybrids at an accuracy of {displaced: accuracy, hybrid, step 50}, which absolute positions exceed.",
    ),
    SyntheticClaim(
        "Other tasks with positions",
        "not tested",
        "Reversal: absolute positions 1.00, RoPE 0.33. Brackets: RoPE 1.00 and 0.95, five to seven effective heads of "
        "12",
        "New",
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
        "**Sixteen exact distances and one far distance (255) cost 0.2 nats or less in prose and copied passages.** A "
        "copy of 511 random tokens costs SmolLM2 2.3, at 767 0.45 ± 0.36. A third to four fifths of what a limit costs "
        "in long texts and copies is place: it remains where far keys keep their order in 16 to 64",
        "Longer texts; copies; more and fewer exact distances; other far distances; far keys near, but in their order "
        "(the place alone), or far but mixed up (one order). In 256 tokens of prose a limit costs SmolLM2 as much as "
        "one far distance, Gemma 0.10 ± 0.02 against 0.05 ± 0.03. Hidden far keys cost more. In Gemma 768 costs 4.4; "
        "its local layers have a window of 512, which may be the reason. [Needles](retrieval.md#distances) keep "
        "1.10 ± 0.23 of 1.53 ± 0.21 if all heads have one far distance. One far distance is the idea of ReRoPE, a "
        "limit that of LM-Infinite ([arXiv 2308.16137](https://arxiv.org/abs/2308.16137)).",
    ),
    Finding(
        "**Additivity is learned.** With the distance component of other texts, trained scores are more additive than "
        "with random weights of the configuration or shuffled ones, in every layer",
        "Other texts' distance components; shuffled weights; random queries and keys of the same residual stream. At a "
        "standard deviation of 0.02 *r* of one text does not separate random weights (claim 3).",
    ),
    Finding(
        "**It is concentration: queries and keys that never meet are as additive.** Means and covariances of a head's "
        "queries and keys find induction heads as well as its scores",
        "Keys of another text keep the distributions and no pair; a normal distribution keeps means and covariances. "
        "Other heads' keys do not find induction heads. In Gemma these are another layer's. ± of AUC from a bootstrap "
        "over heads.",
    ),
    Finding(
        "**With every distance at 5, the loss is no lower than with constant outputs**",
        "The cost depends on the distance: at 0 SmolLM2 does better than with constant outputs, by 0.2 to 0.6, and "
        "Gemma as well as with them. On WikiText the difference at 5 is within the errors.",
    ),
    Finding(
        "**Which layers use distances differs between models**: at distance 5, SmolLM2's last third restores least, "
        "Gemma's first third most",
        "Restoring a layer where all others have distance 5, beside changing it alone (two texts). Shares in SmolLM2 "
        "depend on the text.",
    ),
    Finding(
        "**Sixteen heads give back a part of the distances**, which depends on the distance of the others",
        "A search in place of a ranking, on other texts; five random sets; another distance in the other heads; mean "
        "outputs of the sixteen. Sixteen are 6 % of SmolLM2's heads, and 22 % of Gemma's.",
    ),
    Finding(
        "**In 256 tokens of prose attention to the last 32 keys and the first token recovers most of the loss**, on a "
        "copied passage half or less",
        "The window has no parameters; a text that copies. *Recovered*: the share of the loss between mean outputs and "
        "the model. ± of the static fit over blocks of the texts.",
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
    "16 heads of largest curvature, the others at 5": (
        "16 heads of largest curvature, mean outputs instead, the others at 5",  # any output, or these distances
        "16 heads of largest curvature, the others at 0",  # distances of the heads, and of the others
    ),
}
"""Parts of the names of rows whose intervention changes two things at once, and of those that change one."""

HEADINGS = {
    "B": "## Claims of [B]\n\nAccuracies and drops of small models; seeds and intervals are on the page "
    "[positional deposit](deposit.md). *Shuffled labels* do not depend on the text. ± is over two to five seeds of "
    "12 heads and texts of at most 34 tokens, and over seven and nine models of 96 heads for angles.",
    "findings": "## Findings",
}
