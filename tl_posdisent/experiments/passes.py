"""Forward passes that each tool makes, from the shape of the model and the chosen layers, heads and positions.

A head that is changed in layer l needs only the layers from l on, ``(L - l) / L`` of a pass, and each batch of such
runs has an unmodified text beside them. A measurement of layer l needs the layers up to it, ``(l + 1) / L``.
Backward passes count as passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from tl_posdisent.experiments.causal.streaming_effects import DRAWS

_EXACT = 16  # default of head_labels


@dataclass(frozen=True)
class Work:
    """What a tool is asked to do.

    Attributes:
        n_layers: layers of the model.
        heads: the chosen heads of each chosen layer, layers ascending.
        length, batch: tokens per text, and texts.
        places: positions that are patched one at a time; 1 for all together.
        at_once: largest number of texts in one pass.
        copied: tokens of the repeated random tokens, all texts together (``head_labels``).
    """

    n_layers: int
    heads: Mapping[int, Sequence[int]]
    length: int
    batch: int
    places: int
    at_once: int
    copied: int

    @property
    def n_heads(self) -> int:
        return sum(map(len, self.heads.values()))

    @property
    def up_to(self) -> float:
        """A pass that ends after the last chosen layer."""
        return (max(self.heads) + 1) / self.n_layers

    @property
    def up_to_each(self) -> float:
        """A pass for each chosen layer, which ends after it."""
        return sum(layer + 1 for layer in self.heads) / self.n_layers

    def after(self, layer: int) -> float:
        """A pass that begins at a layer."""
        return (self.n_layers - layer) / self.n_layers

    @property
    def from_first(self) -> float:
        return self.after(min(self.heads))

    def changed(self, times: int = 1, *, share: float = 1.0) -> float:
        """Runs from its layer on for each chosen head and place, some of these in one batch with an unmodified text.

        Args:
            times: number of changes of each head, all of which share batches.
            share: share of the chosen heads that are run, spread over the layers.
        """
        total = 0.0
        for layer, heads in self.heads.items():
            runs = share * len(heads) * self.places * times
            batches = ceil(runs / max(1, self.at_once // self.batch)) if runs >= 1 else runs
            total += self.after(layer) * (runs + batches / self.batch)
        return total

    @property
    def seen(self) -> float:
        """Share of a text from the first query that misses a key, under the default sinks and window."""
        return 1 - min(1, (4 + self.length // 4) / self.length)


def _compared(work: Work) -> float:
    """An unmodified run, a full pass that is compared with a shortcut, and the last block alone."""
    return 2 + 1 / work.n_layers


def _estimated(work: Work) -> float:
    """Gradients of the metric and of each draw of labels, for all heads at once."""
    return 1 + (1 + DRAWS) * work.from_first


def _streaming(work: Work, n: int) -> float:
    run = work.changed(share=min(n, work.n_heads) / work.n_heads)
    return _compared(work) + (1 - work.seen) + work.seen * run


def label_patterns(work: Work) -> float:
    """The attention patterns of one model that ``head_labels`` reads, in the texts and in repeated random tokens."""
    return work.up_to * (1 + work.copied / (work.batch * work.length))


def perturbations(kinds: int, fractions: int, seeds: int) -> float:
    """An unmodified run, and one for each kind, fraction above 0 and seed (``perturbation_curve``)."""
    return 1.0 + kinds * fractions * seeds


def _labels(work: Work) -> float:
    """In the model and one random copy."""
    estimates = _estimated(work) if work.n_heads > _EXACT else 0.0
    return 2 * (label_patterns(work) + estimates + _streaming(work, _EXACT))


def _patched(work: Work) -> float:
    return 1 + _compared(work) + work.changed()


def _one_pass(work: Work) -> float:
    return work.up_to


def _substituted(work: Work) -> float:
    each = sum(work.after(layer) for layer in work.heads)
    return 21.8 + work.changed(3) + 2 * each + 0.8 * len(work.heads)


def _ladder(work: Work) -> float:
    """Nine rungs and the mean output, and six rungs fitted to shuffled tokens."""
    return 4.5 + 1 / work.n_layers + work.changed(9) + work.changed(6) + 3 * work.up_to_each - len(work.heads) / 2


@dataclass(frozen=True)
class Tool:
    """How many passes a tool makes, and which of layers, heads and positions it lets choose."""

    passes: Callable[[Work], float]
    takes: tuple[str, ...] = ("layers",)


_BY_HEAD = ("layers", "heads")
TOOLS: dict[str, Tool] = {
    "additivity": Tool(_one_pass),
    "controlled_distance": Tool(_one_pass),
    "disentanglement": Tool(lambda work: 2.0, ()),
    "dummy_distance_check": Tool(lambda work: work.up_to + 5 * work.up_to_each),
    "positional_symbolic": Tool(_one_pass),
    "preference_flips": Tool(_one_pass),
    "subspace_patterns": Tool(_one_pass),
    "trained_vs_random": Tool(lambda work: 4 * work.up_to),  # three copies
    "fit_attention": Tool(lambda work: 1.0, ()),
    "head_labels": Tool(_labels),
    "intervention_losses": Tool(lambda work: 2.0, ()),
    "head_ablation": Tool(lambda work: 1 + work.changed(), _BY_HEAD),
    "streaming_ablation": Tool(lambda work: _streaming(work, work.n_heads), _BY_HEAD),
    "position_effects": Tool(_estimated, _BY_HEAD),
    "head_patching": Tool(lambda work: work.up_to + _patched(work), (*_BY_HEAD, "positions")),
    "position_patching": Tool(lambda work: work.up_to + _patched(work), _BY_HEAD),
    "component_patching": Tool(lambda work: work.up_to_each + _patched(work), _BY_HEAD),
    "additive_substitution": Tool(_substituted),
    "attention_ladder": Tool(_ladder, _BY_HEAD),
    "positional_subspace": Tool(_one_pass),
    "rope_hadamard": Tool(_one_pass),
    "length_generalization": Tool(lambda work: 1 + work.up_to / 2),
    "output_projection": Tool(lambda work: 1 + work.up_to / 2),
    "perturbation_curve": Tool(lambda work: perturbations(kinds=3, fractions=7, seeds=5), ()),
}

_HOOKS = "returns hooks, which change a pass and make none"
NOT_ESTIMATED: dict[str, str] = {
    "report": "runs as many of the other tools as its sections ask for",
    "check_model": "runs short texts of its own",
    "head_effects": "runs heads until no other can have one of the largest divergences; its table says how many passes",
    "estimated_ladder": "runs heads until their verdicts are decided",
    "replaceable_heads": "measures sets of heads until their number is found",
    "distance_sources": "splits the texts, and the number of passes depends on how many there are",
    "content_position_terms": "splits the texts, and the number of passes depends on how many there are",
    "choice_scores": "runs one text for each choice",
    "perturb": "makes a text or hooks, and runs nothing",
    "capture": "makes one pass up to the last layer, and holds what it returns",
    "show_interventions": "makes two passes",
    "show_loss_change": "makes two passes",
    "random_control": "makes copies of the model",
    "read_model": "makes passes of a few tokens, once for a model",
    "read_attention": "makes passes of a few tokens, once for a model",
    "longer_context": "changes tables, and runs nothing",
    "applied": "installs hooks",
    "estimate": "runs nothing",
    "fitted_attention": "makes one pass up to the last layer, and returns hooks",
    "ablate_heads": _HOOKS,
    "drop_component": _HOOKS,
    "dummy_distance": _HOOKS,
    "lambda_mask": _HOOKS,
    "limit_frequencies": _HOOKS,
    "patch_vectors": _HOOKS,
    "phase_noise": _HOOKS,
    "position_interpolation": _HOOKS,
    "remap_distance": _HOOKS,
    "substitute_additive": _HOOKS,
    "substitute_attention": _HOOKS,
    "swap_positions": _HOOKS,
}
"""Public functions of a model that ``estimate`` does not know, and why."""
