"""The first and the last sections of a report: model and text, main figures beside the papers', reproduction."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version

import pandas as pd
import torch

from tl_posdisent.experiments.causal.attention_ladder import head_verdicts
from tl_posdisent.utils.validation import head_label

from .markup import MISSING, definitions, escape, head_link, number, numbers, paragraph, plural, signed, table
from .measurements import HEAD, Found, SectionName, by_head
from .subject import Subject

A = '<a href="https://arxiv.org/abs/2503.13305">[A]</a>'
B = '<a href="https://arxiv.org/abs/2505.13027">[B]</a>'
_PAPERS = (
    f"<dt>{A}</dt><dd>Han and Ji, <cite>Computation Mechanism Behind LLM Position Generalization</cite>, ACL 2025</dd>"
    f"<dt>{B}</dt><dd>Gu et al., <cite>Deconstructing Positional Information: From Attention Logits to Training "
    "Biases</cite>, ICLR 2026</dd>"
)
_CLEAR = 0.05  # differences of r that are called higher or lower
_MATTERS = 0.01  # nats per token
_FEW = 0.05  # the share of tokens that [A] says may be out of place


def verdict(found: Mapping[SectionName, Found]) -> str:
    """The report in a few sentences, each computed from the data and linked to its section."""
    measured = {name: one for name, one in found.items() if not one.refused}
    sentences = [
        f"{sentence} Only {measured[name].sampled}." if measured[name].sampled else sentence
        for name, write in _VERDICTS.items()
        if name in measured
        for sentence in write(measured[name])
    ]
    if not sentences:
        return ""
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    return f'<section id="verdict"><h2>Verdict</h2><ul>{items}</ul></section>\n'


def _additive_verdict(found: Found) -> list[str]:
    heads = by_head(found.trained).dropna(subset="r")
    if heads.empty:
        return ["No head has scores that vary in this text."]
    # The largest of the three names the head. The query's share is left out: the softmax ignores it.
    shares = {"positional": heads["share_distance"], "content": heads["share_key"], "interacting": 1 - heads["r"] ** 2}
    n = pd.DataFrame(shares).idxmax(axis=1).value_counts().reindex(list(shares), fill_value=0)
    first = (
        f"{n['positional']} of {plural(len(heads), 'head')} {'looks' if n['positional'] == 1 else 'look'} mainly at "
        f"where a key is (<em>positional</em>), {n['content']} mainly at what it is (<em>content</em>), and "
        f"{n['interacting']} at neither alone (<em>interacting</em>): of the variance of their scores, the largest of "
        "three shares is the one that the distance explains alone, the one that the key explains alone, or the one "
        'that no sum of components explains (<a href="#additivity">additivity</a>).'
    )
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    names = [f"{head_link(x['layer'], x['head'])} ({number(x['share_distance'], 2)})" for _, x in top.iterrows()]
    return [
        first,
        f"The distance alone explains the largest share in {', '.join(names)}.",
        *_against_random(found, "r", "the three-axis fit", "additivity"),
    ]


def _shares_verdict(found: Found) -> list[str]:
    return _against_random(found, "r_two_axis", "the two-axis model", "shares")


def _against_random(found: Found, column: str, model: str, section: str) -> list[str]:
    """How many heads are above and below the random-weights baseline, and the means."""
    heads = by_head(found.trained).dropna(subset=column)
    if heads.empty or found.random is None:
        return []
    random = by_head(found.random)[[*HEAD, column]]
    both = heads.merge(random, on=HEAD, suffixes=("", "_random"))
    gain = both[column] - both[f"{column}_random"]
    mean, chance = both[column].mean(), both[f"{column}_random"].mean()
    word = "above" if mean - chance > _CLEAR else "below" if chance - mean > _CLEAR else "as high as"
    higher = int((gain > _CLEAR).sum())
    return [
        f"<em>r</em> of {model} is {number(mean, 2)} on average, {word} that of random weights ({number(chance, 2)}): "
        f"{higher} of {plural(len(gain), 'head')} {'is' if higher == 1 else 'are'} higher by more than {_CLEAR}, "
        f'{int((gain < -_CLEAR).sum())} lower (<a href="#{section}">{section}</a>).'
    ]


def _perturbation_verdict(found: Found) -> list[str]:
    rows = found.trained[found.trained["fraction"] == _FEW]
    if rows.empty or not rows["moved"].any():
        return []
    what = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}
    changes = []
    for _, row in rows.dropna(subset="added_loss").iterrows():
        error = "" if pd.isna(row["added_loss_se"]) else f" ± {number(row['added_loss_se'])}"
        changes.append(f"{what[row['kind']]} {signed(row['added_loss'])}{error}")
    return [
        f"With 5 % of neighbours exchanged the loss at the others changes by (nats per token): {'; '.join(changes)} "
        '(<a href="#perturbation">perturbation</a>).'
    ]


def _ablation_verdict(found: Found) -> list[str]:
    drops = found.trained.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    most, worse = drops.iloc[0], int((drops["effect"] > _MATTERS).sum())
    where = '(<a href="#ablation">ablation</a>)'
    if not most["effect"] > 0:
        return [f"The loss is no higher without any single head {where}."]
    return [
        f"Without {head_label(int(most['layer']), int(most['head']))} the loss rises most, by "
        f"{number(most['effect'])} nats per token; without {worse} of {plural(len(drops), 'head')} it rises by more "
        f"than {_MATTERS} {where}."
    ]


def _ladder_verdict(found: Found) -> list[str]:
    verdicts = head_verdicts(found.trained)
    n = verdicts["verdict"].str.replace("^undecided .*", "undecided", regex=True).value_counts()
    effective = len(verdicts) - int(n.get("no effect", 0))
    link = '(<a href="#ladder">ladder</a>)'
    if not effective:
        return [f"Uniform attention in the place of a single head costs no more than noise in this text {link}."]
    kinds = ("distance", "static", "additive", "banded", "query-dependent", "undecided")
    counted = ", ".join(f"{int(n.get(kind, 0))} <em>{kind}</em>" for kind in kinds)
    return [
        f"For {effective} of {plural(len(verdicts), 'head')} the loss is higher if attention there is uniform. By the "
        f"simplest attention that recovers 95 % of that loss, these are: {counted} {link}."
    ]


_VERDICTS: dict[SectionName, Callable[[Found], list[str]]] = {
    "ladder": _ladder_verdict,
    "additivity": _additive_verdict,
    "shares": _shares_verdict,
    "perturbation": _perturbation_verdict,
    "ablation": _ablation_verdict,
}


def analysed(subject: Subject) -> str:
    model, spec, rotary = subject.model, subject.specs[0], subject.rotary
    parameters = next(model.parameters(), torch.zeros(0, device="cpu"))
    dtype = str(parameters.dtype).removeprefix("torch.")
    turned = "all layers" if rotary == subject.layers else f"layers {numbers(rotary)}" if rotary else "none"
    chosen = [f"{numbers(heads)} in layer {layer}" for layer, heads in subject.heads.items()]
    alike = len(set(map(tuple, subject.heads.values()))) == 1
    heads = numbers(next(iter(subject.heads.values()))) if alike else "; ".join(chosen)
    cut = "" if sum(subject.lengths) == subject.given else f", of {subject.given} tokens given"
    rows = {
        "Model": f"{subject.name()} ({type(model).__name__}, {_millions(subject.parameters())} parameters, {dtype})",
        "Layers": f"{numbers(subject.layers)} of {plural(model.cfg.n_layers, 'layer')}",
        "Heads": f"{heads} of {spec.n_heads} in each layer, {spec.d_head} coordinates, "
        f"{plural(spec.n_kv_heads, 'key head')}",
        "Attention": f"{'causal' if spec.causal else 'in both directions'}; rotary embeddings: {turned}",
        "Text": f"{subject.sizes()}{cut}",
        "It begins": subject.excerpt(),
    }
    return f'<section id="analysed"><h2>What was analysed</h2>{definitions(rows)}</section>\n'


def headline(subject: Subject, found: Mapping[SectionName, Found]) -> str:
    """The correlations of this model beside those of the papers."""
    claims: dict[str, tuple[SectionName, str, str]] = {
        "r, two-axis model, at controlled distances": (
            "shares",
            "r_two_axis",
            f"0.959 {A}; random initialisation far lower",
        ),
        "r, three-axis model, at controlled distances": ("shares", "r_three_axis", MISSING),
        "r, three-axis fit of the text’s own scores": ("additivity", "r", MISSING),
    }
    rows = []
    for measure, (name, column, papers) in claims.items():
        one, random = found.get(name), MISSING
        if one is None or one.refused:
            here = "not asked for" if one is None else "not measured" if one.failed else "not for this model"
        else:
            r = by_head(one.trained)[column]
            here = f"{number(r.mean())} ({number(r.min())} to {number(r.max())})" if len(r) > 1 else number(r.mean())
            here = here if r.notna().any() else "undefined: no head’s scores vary"
            random = MISSING if one.random is None else number(one.random[column].mean())
        rows.append({"measure": measure, "this model": here, "random": random, "the papers": papers})
    small = "Results for a small model may not transfer to a large one, or the other way round. "
    text = (
        f"This model has {_millions(subject.parameters())} parameters and read {sum(subject.lengths)} tokens. {A} "
        f"measured large language models, {B} six-layer models trained on two synthetic tasks: their figures are "
        f"given for comparison. {small if subject.parameters() < 1e8 else ''}Correlations are means over heads. Only "
        "what exceeds the column “random” (the same architecture, untrained, on the same text) has been learned."
    )
    body = table("headline", "The papers’ claims, and this model", pd.DataFrame(rows))
    return f'<section id="headline"><h2>Headline numbers</h2>{body}{paragraph(text)}</section>\n'


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
    return (
        '<section id="reproduce"><h2>How to reproduce</h2>'
        f'<pre tabindex="0"><code>{escape(call)}</code></pre>{definitions(rows, _PAPERS)}</section>\n'
    )
