"""What the page of results says: each claim of the two papers, each finding, and the numbers that it rests on."""

from __future__ import annotations

from typing import Literal, NamedTuple

Line = tuple[str, str, str, int]  # what is measured; study, row and length of the texts in the tables
Status = Literal["Reproduced", "Partly reproduced", "Not reproduced", "Not tested", "New"]


class Claim(NamedTuple):
    """A claim of [A], with the lines of the tables that say whether it holds here."""

    claim: str
    paper: str
    lines: list[Line]
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
    lines: list[Line]
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
one. `docs/findings/tables` has every number, with the number of texts and the call that gives it.

`make findings` measures the column *demo text* in a clone (`docs/findings/__main__.py`, tens of minutes). No number is
corrected for multiple comparisons.

## Claims of [A]"""


def keys_at(label: str, row: str) -> Line:
    return label, "key_component", f"key component, {row}", 256


def shift(label: str, row: str) -> Line:
    return label, "key_component", f"mean score at a distance and distance component, distances{row}", 256


def ratio(label: str, row: str) -> Line:
    return label, "perturbation", f"added loss, {row}, error over texts", 256


def tolerance(label: str, row: str) -> Line:
    return label, "layer_tolerance", f"rank correlation of r with the cost of exchanged neighbours, {row}", 256


def shares(label: str, row: str) -> Line:
    return label, "far_shares", f"share of {row}", 256


def in_layers(label: str, study: str, outputs: str, length: int) -> list[Line]:
    labels = {"lowest": f"{label}: lowest layer", "highest": "… highest layer"}
    return [(shown, study, f"probe, {outputs}, {layer} layer", length) for layer, shown in labels.items()]


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
        "The lowest layer is far below the mean, and more than half of the heads are below 0.9.",
    ),
    Claim(
        "Random initialisation is far from it",
        "far lower",
        [
            ("*r*, three-axis, trained", "controlled", "r_three_axis, trained", 256),
            ("… random weights, standard deviation 1/24 (Gemma: 0.02)", "controlled", "r_three_axis, random", 256),
            ("… random weights, 0.02", "controlled", "r_three_axis, random of 0.02", 256),
            ("*r*, two-axis, trained", "controlled", "r_two_axis, trained", 256),
            ("… random weights, standard deviation 1/24 (Gemma: 0.02)", "controlled", "r_two_axis, random", 256),
            ("… random weights, 0.02", "controlled", "r_two_axis, random of 0.02", 256),
        ],
        "Partly reproduced",
        "At the standard deviation of the configuration. A random copy of 0.02 is nearly as additive as SmolLM2, and "
        "the two-axis sum separates less.",
    ),
    Claim(
        "At a dummy distance the key component stays as it is",
        "stays",
        [
            keys_at("correlation of the own key component with that at distance 64", "own and distance 64, trained"),
            keys_at("… random weights", "own and distance 64, random"),
            keys_at("correlation of the own key component with that at distance 1", "own and distance 1, trained"),
            keys_at("… random weights", "own and distance 1, random"),
        ],
        "Partly reproduced",
        "At distance 64, but not next to the query: there it is little above random weights, on the demo text below.",
    ),
    Claim(
        "At a dummy distance the scores move by the distance component",
        "shift",
        [
            shift("median head: correlation with the component", ", correlation, median head, trained"),
            shift("… random weights", ", correlation, median head, random"),
            shift("… slope, distances 1 to 15", " below 16, slope, median head, trained"),
            shift("… random weights", " below 16, slope, median head, random"),
            shift("… slope, distances 16 to 127", " from 16 on, slope, median head, trained"),
            shift("… random weights", " from 16 on, slope, median head, random"),
            shift("mean of heads: slope, distances 1 to 15", " below 16, slope, trained"),
            shift("… random weights", " below 16, slope, random"),
            shift("… slope, distances 16 to 127", " from 16 on, slope, trained"),
            shift("… random weights", " from 16 on, slope, random"),
        ],
        "Partly reproduced",
        "In the median head they follow the component closely, and move by 0.86 to 0.95 of it from distance 16 on, by "
        "0.58 to 0.74 below. Random weights do so, too.",
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
            (
                "content's share of the scores, wavelengths above 4096",
                "subspaces",
                "semantic, wavelengths above 4096, trained",
                256,
            ),
            ("… random weights", "subspaces", "semantic, wavelengths above 4096, random", 256),
            (
                "share of the content's variance, wavelengths above 4096",
                "subspaces",
                "content, wavelengths above 4096, trained",
                256,
            ),
            ("… random weights", "subspaces", "content, wavelengths above 4096, random", 256),
            (
                "share of \\|q\\| \\|k\\|, wavelengths above 4096",
                "subspaces",
                "size, wavelengths above 4096, trained",
                256,
            ),
            ("… random weights", "subspaces", "size, wavelengths above 4096, random", 256),
            ("share of the subspaces", "subspaces", "share of subspaces, wavelengths above 4096", 256),
        ],
        "Partly reproduced",
        "In SmolLM2 both halves are learned: without training, slow subspaces hold less of the content, and of "
        "\\|q\\| \\|k\\| as much as their number. In Gemma they hold less of it than with random weights.",
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
            ("accuracy, order, 10 %", "perturbation", "accuracy, order, 10%", 256),
            ("accuracy, order, 25 %", "perturbation", "accuracy, order, 25%", 256),
            ("questions right, order, 10 %", "questions", "right, order, 10%", 0),
            ("questions right, order, 100 %", "questions", "right, order, 100%", 0),
        ],
        "Reproduced",
        "At 5 % accuracy falls by a tenth or less, at 25 % by up to two fifths. Questions have two answers (chance "
        "0.5); with all neighbours exchanged most are right.",
    ),
    Claim(
        "Order, positions and rotary features are tolerated alike",
        "alike",
        [
            ratio("loss added by order over that by positions, 5 %, ± over texts", "order over index, 5%"),
            ratio("loss added by features over that by positions, 5 %, ± over texts", "feature over index, 5%"),
        ],
        "Not reproduced",
        "Features cost least. Order costs more than positions, but on WikiText by less than the error over texts.",
    ),
    Claim(
        "More additive scores tolerate more",
        "an explanation",
        [
            tolerance("layers: rank correlation of *r* with the cost of exchanged neighbours", "layers"),
            tolerance("… given the cost of distance 5", "given that of distance 5, layers"),
            tolerance("… p of a random order", "given that of distance 5, layers, p of a random order"),
            tolerance("heads: rank correlation of *r* with the cost of exchanged neighbours", "heads"),
            tolerance("… given the cost of distance 5", "given that of distance 5, heads"),
            tolerance("… p of a random order", "given that of distance 5, heads, p of a random order"),
        ],
        "Not reproduced",
        "The opposite: more additive layers and heads cost more. Given how much their distances matter at all, little "
        "is left of this.",
    ),
    Claim(
        "In long texts scores depend on content, not on distance",
        "an explanation",
        [
            line
            for first, last in ((0, 255), (256, 511), (1024, 1279), (3840, 4095))
            for line in (
                shares(f"share of the distance, {first} to {last}", f"distance, distances {first} to {last}, trained"),
                shares("… random weights", f"distance, distances {first} to {last}, random"),
            )
        ],
        "Partly reproduced",
        "The share of the distance falls mostly within 512 tokens, and remains four times that of random weights. "
        "Ranges of equal width; queries and keys of texts of 256 tokens.",
    ),
    Claim(
        "Beyond the training length outputs leave the region of training; limited distances keep them in it",
        "seen in figures",
        [
            *in_layers("AUC of a probe, 1024 and 512 tokens", "outputs", "512 and 1024 tokens", 1024),
            *in_layers("… 512 and 256 tokens, both trained", "outputs", "256 and 512 tokens", 1024),
            *in_layers("… 1024 tokens, distances at most 511", "outputs", "512 and 1024 tokens, ceiling", 1024),
            *in_layers("… 1024 tokens, Λ-mask", "outputs", "512 and 1024 tokens, Λ-mask", 1024),
            *in_layers("… positions to 12 031 and 8191, same keys", "far_positions", "beyond it", 512),
            *in_layers(
                "… positions to 8191 and 4351, both trained", "far_positions", "within the training length", 512
            ),
            *in_layers("… positions to 12 031, distances at most 8191", "far_positions", "beyond it, ceiling", 512),
            (
                "AUC of the distance, positions to 12 031 and 8191: highest layer",
                "far_positions",
                "distance, beyond it, highest layer",
                512,
            ),
            (
                "… positions to 8191 and 4351",
                "far_positions",
                "distance, within the training length, highest layer",
                512,
            ),
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
        ],
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


def by_far_distance(label: str, kind: str, length: int) -> list[Line]:
    """One far distance; a limit on distances, which changes resolution and place; place alone; and far keys hidden."""
    lines = {
        f"{label}: all others at {length * 3 // 4}": f"16 exact, others {length * 3 // 4}",
        "… all others at 255": "16 exact, others 255",
        "… all others at 16": "16 exact, others 16",
        "… the others in their order in 16 to 64": "16 exact, others in 16 to 64",
        "… the others hidden, but the first": "16 exact, others hidden but the first",
    }
    return [(name, "far_distance", f"added loss, {row}, {kind}", length) for name, row in lines.items()]


def third_of(label: str, others: str, third: str) -> Line:
    return label, "far_by_layer", f"added loss, 16 exact, others {others}, {third} third of the layers", 1024


def far(label: str, row: str) -> Line:
    return label, "far_distance", f"added loss, {row}, prose, second half of 1024", 1024


def given_back(label: str, row: str) -> Line:
    return label, "sets", f"nats given back by 16 {row}", 256


def layers(label: str, row: str) -> Line:
    return label, "layers", row, 256


def fixed(label: str, row: str) -> Line:
    return label, "fixed_distance", row, 256


FINDINGS = [
    Finding(
        "**Sixteen exact distances and one far distance (255) cost 0.2 nats or less in prose and copied passages.** A "
        "copy of 511 random tokens costs SmolLM2 2.3, at 767 0.45 ± 0.36. A third to four fifths of what a limit costs "
        "in long texts and copies is place: it remains where far keys keep their order in 16 to 64",
        [
            *by_far_distance("prose, 256 tokens", "prose", 256),
            *by_far_distance("second half of 1024 tokens", "prose, second half of 1024", 1024),
            *by_far_distance("second half of 2048 tokens", "prose, second half of 2048", 2048)[:-1],
            *by_far_distance("second copy of a passage", "second copy of a passage", 255),
            *by_far_distance("second copy of 127 random tokens", "second copy of random tokens", 255),
            *by_far_distance("second copy of 511 random tokens", "second copy of 1024 random tokens", 1023),
            far("second half of 1024 tokens, 4 exact, all others at 255", "4 exact, others 255"),
            far("… 8 exact", "8 exact, others 255"),
            far("… 32 exact", "32 exact, others 255"),
            far("… 16 exact, all others at 64", "16 exact, others 64"),
            far("… 16 exact, the others mixed up", "16 exact, others mixed up"),
            *(
                third_of(f"… {third} third of the layers: 16 exact, the others {shown}", others, third)
                for third in ("first", "second", "last")
                for others, shown in (("255", "at 255"), ("16", "at 16"), ("in 16 to 64", "in 16 to 64"))
            ),
        ],
        "Longer texts; copies; more and fewer exact distances; other far distances; far keys near, but in their order "
        "(the place alone), or far but mixed up (one order). In 256 tokens of prose a limit costs no more than one far "
        "distance. Hidden far keys cost more. In Gemma 768 costs 4.4; its local layers have a window of 512, "
        "which may be the reason. [Needles](retrieval.md#distances) lose a quarter if all heads have one far distance. "
        "One far distance is the idea of ReRoPE, a limit that of LM-Infinite ([arXiv "
        "2308.16137](https://arxiv.org/abs/2308.16137)).",
    ),
    Finding(
        "**Additivity is learned.** With the distance component of other texts, trained scores are more additive than "
        "with random weights of the configuration or shuffled ones, in every layer",
        [
            ("*r* held out, trained", "additive", "r_held_out, trained", 256),
            ("… random weights", "additive", "r_held_out, random", 256),
            ("… shuffled weights", "additive", "r_held_out, shuffled", 256),
            ("… random queries and keys", "additive", "r_held_out, random queries and keys", 256),
            ("share of layers above random and shuffled", "additive", "share of layers above both copies", 256),
        ],
        "Other texts' distance components; shuffled weights; random queries and keys of the same residual stream. At a "
        "standard deviation of 0.02 *r* of one text does not separate random weights (claim 3).",
    ),
    Finding(
        "**It is concentration: queries and keys that never meet are as additive.** Means and covariances of a head's "
        "queries and keys find induction heads as well as its scores",
        [
            ("*r*, own", "concentration", "r, own", 256),
            ("… keys of another text", "concentration", "r, keys of another text", 256),
            ("… queries and keys at permuted positions", "concentration", "r, permuted positions", 256),
            ("… normal distribution with their two moments", "concentration", "r, normal distribution", 256),
            ("… keys of another key head or layer", "concentration", "r, foreign keys", 256),
            ("… random weights", "concentration", "r, random weights", 256),
            ("AUC of 1 − *r* for induction heads, own", "concentration", "AUC of 1 - r for induction heads, own", 256),
            (
                "… keys of another text",
                "concentration",
                "AUC of 1 - r for induction heads, keys of another text",
                256,
            ),
            (
                "… normal distribution with their two moments",
                "concentration",
                "AUC of 1 - r for induction heads, normal distribution",
                256,
            ),
            (
                "… keys of another key head or layer",
                "concentration",
                "AUC of 1 - r for induction heads, foreign keys",
                256,
            ),
            ("… random weights", "concentration", "AUC of 1 - r for induction heads, random weights", 256),
        ],
        "Keys of another text keep the distributions and no pair; a normal distribution keeps means and covariances. "
        "Other heads' keys do not find induction heads. In Gemma these are another layer's. ± of AUC from a bootstrap "
        "over heads.",
    ),
    Finding(
        "**With every distance at 5, the loss is no lower than with constant outputs**",
        [
            fixed("loss", "loss"),
            fixed("loss added by mean outputs", "added loss, mean outputs"),
            fixed("loss added by every distance 5", "added loss, every distance 5"),
            fixed("… by every distance 0", "added loss, every distance 0"),
            fixed("… by every distance 50", "added loss, every distance 50"),
            fixed("… by shuffled positions", "added loss, shuffled positions"),
        ],
        "The cost depends on the distance: at 0 SmolLM2 does better than with constant outputs, by 0.2 to 0.6, and "
        "Gemma as well as with them. On WikiText the difference at 5 is within the errors.",
    ),
    Finding(
        "**Which layers use distances differs between models**: at distance 5, SmolLM2's last third restores least, "
        "Gemma's first third most",
        [
            layers("share of what single layers restore: first third", "share of restored, first third of the layers"),
            layers("… second third", "share of restored, second third of the layers"),
            layers("… last third", "share of restored, last third of the layers"),
            layers(
                "share of what single layers cost, changed alone: first third",
                "share of alone, first third of the layers",
            ),
            layers(
                "sum of the costs of single layers over the cost of all", "costs of single layers over the cost of all"
            ),
        ],
        "Restoring a layer where all others have distance 5, beside changing it alone (two texts). Shares in SmolLM2 "
        "depend on the text.",
    ),
    Finding(
        "**Sixteen heads give back a part of the distances**, which depends on the distance of the others",
        [
            ("loss added by every distance 5", "sets", "added loss, all heads at 5", 256),
            given_back(
                "nats given back by 16 heads of largest curvature", "heads of largest curvature, the others at 5"
            ),
            given_back("… by 16 heads of a greedy search", "heads of a greedy search, the others at 5"),
            given_back("… by 16 random heads", "random heads, the others at 5"),
            given_back(
                "… by mean outputs of the 16, by curvature",
                "heads of largest curvature, mean outputs instead, the others at 5",
            ),
            ("loss added by every distance 0", "sets", "added loss, all heads at 0", 256),
            given_back(
                "nats given back by 16 heads of largest curvature", "heads of largest curvature, the others at 0"
            ),
            given_back("… by 16 heads of a greedy search", "heads of a greedy search, the others at 0"),
            given_back("… by 16 random heads", "random heads, the others at 0"),
        ],
        "A search in place of a ranking, on other texts; five random sets; another distance in the other heads; mean "
        "outputs of the sixteen. Sixteen are 6 % of SmolLM2's heads, and 22 % of Gemma's.",
    ),
    Finding(
        "**In 256 tokens of prose the last 32 keys and the first token keep most of attention**, on a copied passage "
        "about half or less",
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
                "… the same, second copy of a passage",
                "rungs",
                "attention kept, own in a window of 32 and the first token, second copy of a passage",
                255,
            ),
            ("… static, fitted to other texts", "rungs", "attention kept, static, fitted to other texts", 256),
        ],
        "The window has no parameters; a text that copies. *Kept*: the share of the loss between mean outputs and the "
        "model. ± of the static fit over blocks of the texts.",
    ),
    Finding(
        "**Beyond its training length SmolLM2 fails late, not at once**",
        [
            ("loss added by the position, 7168 to 8192", "beyond", "loss added by the position, 7168 to 8192", 11264),
            ("… 8192 to 9728", "beyond", "loss added by the position, 8192 to 9728", 11264),
            ("… 9728 to 10 240", "beyond", "loss added by the position, 9728 to 10240", 11264),
            ("… 10 240 to 10 752", "beyond", "loss added by the position, 10240 to 10752", 11264),
            ("… 10 752 to 11 264", "beyond", "loss added by the position, 10752 to 11264", 11264),
        ],
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
    "12 heads and texts of at most 34 tokens, and over seven and nine models of 96 heads for angles "
    "(`docs/findings/training.py`).",
    "findings": "## Findings",
}
