"""The first and the last sections of a report: model and text, main figures beside the papers', reproduction."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version

import pandas as pd
import torch

from tl_posdisent.experiments.causal.attention_ladder import head_verdicts

from .markup import MISSING, escape, head_link, number, numbers, paragraph, plural, raw_table, signed
from .measurements import Found, SectionName, by_head
from .subject import Subject

A = '<a href="https://arxiv.org/abs/2503.13305">[A]</a>'
B = '<a href="https://arxiv.org/abs/2505.13027">[B]</a>'
_COLUMNS = ("this model", "random", "the papers")
_CLEAR = 0.05  # differences of r that are called higher or lower
_MATTERS = 0.01  # nats per token
_FEW = 0.05  # the share of tokens that [A] says may be out of place


def verdict(found: Mapping[SectionName, Found]) -> str:
    """The report in a few sentences, each computed from the data and linked to its section."""
    parts = {name: one for name, one in found.items() if not one.refused}
    said = [sentence for name, write in _VERDICTS.items() if name in parts for sentence in write(parts[name])]
    if not said:
        return ""
    items = "".join(f"<li>{sentence}</li>" for sentence in said)
    return f'<section id="verdict"><h2>Verdict</h2><ul>{items}</ul></section>\n'


def _additive_verdict(found: Found) -> list[str]:
    heads = by_head(found.trained).dropna(subset="r")
    if heads.empty:
        return ["No head has scores that vary in this text."]
    rest = 1 - heads["r"] ** 2
    # Of the three, the largest names the head. The query's share is left out: the softmax ignores it.
    kinds = pd.DataFrame({"positional": heads["share_distance"], "static": heads["share_key"], "interacting": rest})
    counts = kinds.idxmax(axis=1).value_counts().reindex(kinds.columns, fill_value=0)
    n = {kind: int(count) for kind, count in counts.items()}
    first = (
        f"Of {plural(len(heads), 'head')}, {n['positional']} {_are(n['positional'])} mainly <em>positional</em>, "
        f"{n['static']} mainly <em>static</em> and {n['interacting']} mainly <em>interacting</em>: of the variance of "
        "their scores, the largest of three shares is the one that the distance explains alone, the one that the key "
        'explains alone, or the one that no sum of parts explains (<a href="#additivity">additivity</a>).'
    )
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    names = [f"{head_link(x['layer'], x['head'])} ({number(x['share_distance'], 2)})" for _, x in top.iterrows()]
    sentences = [first, f"The distance alone explains the largest share in {', '.join(names)}."]
    if found.random is not None:
        sentences.append(_against_random(heads, by_head(found.random), "r", "the three-axis fit", "additivity"))
    return sentences


def _shares_verdict(found: Found) -> list[str]:
    heads = by_head(found.trained).dropna(subset="r_two_axis")
    if heads.empty or found.random is None:
        return []
    return [_against_random(heads, by_head(found.random), "r_two_axis", "the two-axis model", "shares")]


def _against_random(heads: pd.DataFrame, random: pd.DataFrame, column: str, model: str, section: str) -> str:
    """How many heads are above and below the random-weights baseline, and the means."""
    both = heads.merge(random[["layer", "head", column]], on=["layer", "head"], suffixes=("", "_random"))
    gain = both[column] - both[f"{column}_random"]
    mean, chance = both[column].mean(), both[f"{column}_random"].mean()
    word = "above" if mean - chance > _CLEAR else "below" if chance - mean > _CLEAR else "as high as"
    return (
        f"<em>r</em> of {model} is {number(mean, 2)} on average, {word} that of random weights ({number(chance, 2)}): "
        f"{int((gain > _CLEAR).sum())} of {plural(len(gain), 'head')} {_are(int((gain > _CLEAR).sum()))} higher by "
        f'more than {_CLEAR}, {int((gain < -_CLEAR).sum())} lower (<a href="#{section}">{section}</a>).'
    )


def _perturbation_verdict(found: Found) -> list[str]:
    rows = found.trained[found.trained["fraction"] == _FEW]
    if rows.empty or not rows["moved"].any():
        return []
    what = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}
    parts = []
    for _, row in rows.dropna(subset="added_loss").iterrows():
        error = "" if pd.isna(row["added_loss_se"]) else f" ± {number(row['added_loss_se'])}"
        parts.append(f"{what[row['kind']]} {signed(row['added_loss'])}{error}")
    listed = "; ".join(parts)
    return [
        f"With 5 % of neighbours exchanged the loss at the others changes by (nats per token): {listed} "
        '(<a href="#perturbation">perturbation</a>).'
    ]


def _ablation_verdict(found: Found) -> list[str]:
    drops = found.trained.sort_values("effect", ascending=False, kind="stable")
    most, worse = drops.iloc[0], int((drops["effect"] > _MATTERS).sum())
    where = '(<a href="#ablation">ablation</a>)'
    if not most["effect"] > 0:
        return [f"The loss is no higher without any single head {where}."]
    return [
        f"Without layer {int(most['layer'])}, head {int(most['head'])} the loss rises most, by "
        f"{number(most['effect'])} nats per token; without {worse} of {plural(len(drops), 'head')} it rises by more "
        f"than {_MATTERS} {where}."
    ]


def _ladder_verdict(found: Found) -> list[str]:
    verdicts = head_verdicts(found.trained)
    n = verdicts["verdict"].value_counts()
    effective = len(verdicts) - int(n.get("no effect", 0))
    link = '(<a href="#ladder">ladder</a>)'
    if not effective:
        return [f"Uniform attention in the place of a single head costs no more than noise in this text {link}."]
    kinds = ("positional", "static", "banded", "query-dependent")
    counted = ", ".join(f"{int(n.get(kind, 0))} <em>{kind}</em>" for kind in kinds)
    return [
        f"For {effective} of {plural(len(verdicts), 'head')} the loss is higher if attention there is uniform. By the "
        f"simplest attention that recovers 95 % of that loss, these are: {counted} {link}."
    ]


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


_VERDICTS: dict[SectionName, Callable[[Found], list[str]]] = {
    "ladder": _ladder_verdict,
    "additivity": _additive_verdict,
    "shares": _shares_verdict,
    "perturbation": _perturbation_verdict,
    "ablation": _ablation_verdict,
}


def analysed(subject: Subject) -> str:
    """Which model, which text."""
    model = subject.model
    spec, rotary = subject.specs[0], subject.rotary
    cut = "" if sum(subject.lengths) == subject.given else f", of {subject.given} tokens given"
    turned = "all layers" if rotary == subject.layers else f"layers {numbers(rotary)}" if rotary else "none"
    parameters = next(model.parameters(), torch.zeros(0))
    rows = {
        "Model": f"{subject.name()} ({type(model).__name__}, {_millions(subject.parameters())} parameters, "
        f"{str(parameters.dtype).removeprefix('torch.')})",
        "Layers": f"{numbers(subject.layers)} of {plural(model.cfg.n_layers, 'layer')}",
        "Heads": f"{_heads(subject)} of {spec.n_heads} in each layer, {spec.d_head} coordinates, "
        f"{plural(spec.n_kv_heads, 'key head')}",
        "Attention": f"{'causal' if spec.causal else 'in both directions'}; rotary embeddings: {turned}",
        "Text": f"{subject.sizes()}{cut}",
        "It begins": subject.excerpt(),
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f'<section id="analysed"><h2>What was analysed</h2><dl>{items}</dl></section>\n'


def _heads(subject: Subject) -> str:
    different = {tuple(heads) for heads in subject.heads.values()}
    if len(different) == 1:
        return numbers(different.pop())
    return "; ".join(f"{numbers(heads)} in layer {layer}" for layer, heads in subject.heads.items())


def headline(subject: Subject, found: Mapping[SectionName, Found]) -> str:
    """The papers' claims beside the figures of this model."""
    rows = [
        _correlation(
            found.get("shares"),
            "r_two_axis",
            "r, two-axis model, at controlled distances",
            f"0.959 {A}; random initialisation far lower",
        ),
        _correlation(found.get("shares"), "r_three_axis", "r, three-axis model, at controlled distances", MISSING),
        _correlation(found.get("additivity"), "r", "r, three-axis fit of the text’s own scores", MISSING),
        _disorder(found.get("perturbation")),
        _missed(found.get("ablation")),
    ]
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("measure", *_COLUMNS))
    said = paragraph(
        f"This model has {_millions(subject.parameters())} parameters and read {sum(subject.lengths)} tokens. {A} "
        f"measured large language models, {B} six-layer models trained on two synthetic tasks: their figures are "
        "given for comparison. " + _small(subject) + "Correlations are means over heads. Only what exceeds the column "
        "“random” (the same architecture, untrained, on the same text) has been learned."
    )
    body = raw_table("headline", "The papers’ claims, and this model", heads, rows)
    return f'<section id="headline"><h2>Headline numbers</h2>{body}{said}</section>\n'


def _row(measure: str, here: str, random: str, papers: str) -> str:
    cells = "".join(
        f'<td data-name="{name}">{cell}</td>' for name, cell in zip(_COLUMNS, (here, random, papers), strict=True)
    )
    return f'<tr><th scope="row">{measure}</th>{cells}</tr>'


def _absent(found: Found | None) -> str | None:
    return "not asked for" if found is None else "not for this model" if found.refused else None


def _correlation(found: Found | None, column: str, measure: str, papers: str) -> str:
    absent = _absent(found)
    if absent or found is None:
        return _row(measure, absent or "", MISSING, papers)
    r = by_head(found.trained)[column]
    chance = MISSING if found.random is None else number(found.random[column].mean())
    here = f"{number(r.mean())} ({number(r.min())} to {number(r.max())})" if len(r) > 1 else number(r.mean())
    return _row(measure, here if r.notna().any() else "undefined: no head’s scores vary", chance, papers)


def _disorder(found: Found | None) -> str:
    measure, papers = "loss added with 5 % of the tokens exchanged (nats)", f"up to 5 % is tolerated {A}"
    absent = _absent(found)
    if absent or found is None:
        return _row(measure, absent or "", MISSING, papers)
    rows = found.trained[found.trained["fraction"] == _FEW].set_index("kind")
    if not rows["moved"].any():
        return _row(measure, "no token moves in so short a text", MISSING, papers)
    here = ", ".join(f"{kind} {signed(value)}" for kind, value in rows["added_loss"].items())
    return _row(measure, here, MISSING, papers)


def _missed(found: Found | None) -> str:
    measure, papers = "head with the largest added loss", f"one head of an early layer {B}"
    absent = _absent(found)
    if absent or found is None:
        return _row(measure, absent or "", MISSING, papers)
    drops: pd.DataFrame = found.trained.sort_values("effect", ascending=False, kind="stable")
    most = drops.iloc[0]
    if not most["effect"] > 0:
        return _row(measure, "none: the loss is no higher without any of them", MISSING, papers)
    share = most["effect"] / drops["effect"].clip(lower=0).sum()
    here = (
        f"layer {int(most['layer'])}, head {int(most['head'])}: {signed(most['effect'])} nats, "
        f"{100 * share:.0f} % of the sum over heads"
    )
    return _row(measure, here, MISSING, papers)


def _small(subject: Subject) -> str:
    if subject.parameters() >= 1e8:
        return ""
    return "Results for a small model may not transfer to a large one, or the other way round. "


def _millions(n: int) -> str:
    return f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million" if n >= 1e5 else str(n)


def reproduce(subject: Subject, call: str, seed: int, control: int) -> str:
    """Versions, seed, command."""
    packages = ("tl_posdisent", "transformer_lens", "circuitsvis")
    versions = {name: version(name.replace("_", "-")) for name in packages}
    versions |= {"torch": torch.__version__, "Python": platform.python_version()}
    seeds = f"seed {seed}" + (f" (random initialisations: {numbers(range(seed, seed + control))})" if control else "")
    rows = {
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Seed": seeds,
        "Token ids": f"SHA-256 {subject.fingerprint()}…, int64, {subject.tokens.shape[0]} × {subject.tokens.shape[1]}",
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    papers = (
        f"<dt>{A}</dt><dd>Han and Ji, <cite>Computation Mechanism Behind LLM Position Generalization</cite>, ACL 2025"
        f"</dd><dt>{B}</dt><dd>Gu et al., <cite>Deconstructing Positional Information: From Attention Logits to "
        "Training Biases</cite>, ICLR 2026</dd>"
    )
    return (
        '<section id="reproduce"><h2>How to reproduce</h2>'
        f'<pre tabindex="0"><code>{escape(call)}</code></pre><dl>{items}{papers}</dl></section>\n'
    )
