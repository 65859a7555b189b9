"""How to reproduce a report: model, text, versions, seed and command."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version

import torch
from markupsafe import Markup

from tl_posdisent.models.loading.random_init import described_copies
from tl_posdisent.page.markup import render
from tl_posdisent.page.section import Settings
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import numbers
from tl_posdisent.utils.words import plural

_WORDS = 60
"""Tokens of the first text that are shown."""


def reproduce(subject: Subject, command: str, settings: Settings) -> Markup:
    """Render the command that makes the report, and what it was made of."""
    packages = ("tl_posdisent", "transformer_lens")
    versions = {name: version(name.replace("_", "-")) for name in packages}
    versions |= {"torch": torch.__version__, "Python": platform.python_version()}
    digest = hashlib.sha256(subject.tokens.cpu().numpy().tobytes()).hexdigest()
    rows = {
        **_model(subject),
        **_text(subject),
        "Token ids": f"SHA-256 {digest[:16]}…, int64, {subject.tokens.shape[0]} × {subject.tokens.shape[1]}",
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Seed": f"seed {settings.seed}",
        **({"Random": described_copies(settings.std, settings.copy_seeds)} if settings.copies else {}),
    }
    return render("reproduce", command=command, rows=rows)


def _model(subject: Subject) -> dict[str, str]:
    model, spec, layers = subject.model, subject.specs[0], list(subject.heads)
    rotary = [spec.layer for spec in subject.specs if spec.rotary is not None]
    turned = "all layers" if rotary == layers else f"layers {numbers(rotary)}" if rotary else "none"
    local = {spec.layer: spec.window for spec in subject.specs if spec.window is not None}
    sizes = " or ".join(str(size) for size in sorted(set(local.values())))
    windows = f"layers {numbers(list(local))}, of {sizes} tokens, the query’s own included" if local else "none"
    dtype = str(next(model.parameters(), torch.zeros(0)).dtype).removeprefix("torch.")
    return {
        "Model": f"{subject.name()} ({type(model).__name__}, {dtype})",
        "Layers": f"{numbers(layers)} of {plural(model.cfg.n_layers, 'layer')}",
        "Heads": f"{len(subject.pairs)}, of {spec.n_heads} a layer, {spec.d_head} coordinates, "
        f"{plural(spec.n_kv_heads, 'key head')}",
        "Attention": f"{'causal' if spec.causal else 'in both directions'}; rotary embeddings: {turned}; sliding "
        f"windows: {windows}",
    }


def _text(subject: Subject) -> dict[str, str]:
    words, n_tokens = subject.words, subject.tokens.numel()
    cut = "" if n_tokens == subject.n_given else f", of {subject.n_given} tokens given"
    nameless = words == [str(i) for i in subject.tokens[0].tolist()]  # a model without a tokenizer
    begins = (" " if nameless else "").join(words[:_WORDS])
    return {"Text": f"{subject.sizes()}{cut}", "It begins": begins + (" …" if len(words) > _WORDS else "")}
