"""The provenance of a report: model, text, versions, seed and command."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import version

import torch
from markupsafe import Markup

from tl_posdisent.models.loading.random_init import described_copies
from tl_posdisent.page.deciding.words import numbers
from tl_posdisent.page.drawing.markup import render
from tl_posdisent.page.measuring.heads_to_run import sample_list
from tl_posdisent.page.measuring.measurement import Settings
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.utils.words import plural


def analysed(subject: Subject, sampled: Sequence[str] = ()) -> Markup:
    """Render the description of the model and of the text, and the heads that the ``sampled`` sections ran."""
    model, spec, words = subject.model, subject.specs[0], subject.words
    rotary = [spec.layer for spec in subject.specs if spec.rotary is not None]
    nameless = words == [str(i) for i in subject.first[0].tolist()]  # a model without a tokenizer
    parameters = next(model.parameters(), torch.zeros(0))
    dtype = str(parameters.dtype).removeprefix("torch.")
    turned = "all layers" if rotary == subject.layers else f"layers {numbers(rotary)}" if rotary else "none"
    cut = "" if sum(subject.lengths) == subject.n_passed else f", of {subject.n_passed} tokens given"
    rows = {
        "Model": f"{subject.name()} ({type(model).__name__}, {dtype})",
        "Layers": f"{numbers(subject.layers)} of {plural(model.cfg.n_layers, 'layer')}",
        "Heads": f"{len(subject.pairs)}, of {spec.n_heads} a layer, {spec.d_head} coordinates, "
        f"{plural(spec.n_kv_heads, 'key head')}",
        "Attention": f"{'causal' if spec.causal else 'in both directions'}; rotary embeddings: {turned}",
        **({f"Heads of {' and '.join(sampled)}": sample_list(subject)} if sampled else {}),
        **windows(subject),
        "Text": f"{subject.sizes()}{cut}",
        "It begins": (" " if nameless else "").join(words[:60]) + (" …" if len(words) > 60 else ""),
    }
    return render("analysed", rows=rows)


def windows(subject: Subject) -> dict[str, str]:
    """State which layers have a sliding window, and whether a text is long enough to reach it; empty without any."""
    local = [spec.layer for spec in subject.specs if spec.window is not None]
    if not local:
        return {}
    rest = [layer for layer in subject.layers if layer not in local]
    sizes = sorted({spec.window for spec in subject.specs if spec.window is not None})
    longest, named = max(subject.lengths), " or ".join(map(str, sizes))
    missed = [str(size) for size in sizes if longest <= size]
    reached = "the longest text reaches it" if len(sizes) == 1 else "the longest text reaches them"
    if missed:
        which = "the window" if len(sizes) == 1 else f"the window of {' or '.join(missed)}"
        reached = f"{which} was never reached: the longest text has {plural(longest, 'token')}"
    globally = f"{plural(len(rest), 'global layer')}" + (f" ({numbers(rest)})" if rest else "")
    window = f"a window of {named} tokens, the query’s own included"
    return {"Windows": f"{plural(len(local), 'local layer')} with {window}, and {globally}; {reached}"}


def reproduce(subject: Subject, call: str, settings: Settings) -> Markup:
    """Render the versions, the seed and the command that reproduce the report."""
    ids = torch.where(subject.real, subject.tokens, -1)  # padding counts as -1
    digest = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
    packages = ("tl_posdisent", "transformer_lens", "circuitsvis")
    versions = {name: version(name.replace("_", "-")) for name in packages}
    versions |= {"torch": torch.__version__, "Python": platform.python_version()}
    rows = {
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Seed": f"seed {settings.seed}",
        **({"Random": described_copies(settings.std, settings.copy_seeds)} if settings.copies else {}),
        "Token ids": f"SHA-256 {digest[:16]}…, int64, {subject.tokens.shape[0]} × {subject.tokens.shape[1]}",
    }
    return render("reproduce", command=call, rows=rows)
