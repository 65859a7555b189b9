"""Draw what a page shows and no figure can, and write ``docs/gallery.md``: ``python docs/figures/gallery.py [page]``.

Widgets and the report are drawn by Chromium, as in ``notebooks.py``; the figures are those of ``make.py``. With
``page`` only the page is written, which needs neither.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "gallery.md"

START = """\
# Gallery

What can be drawn? One picture each, with its call and the page that explains it. Pictures are of the demo model, unless
they name another one.
"""


@dataclass(frozen=True)
class Picture:
    """A file in this folder, what it shows in one sentence, the call, and the page (of ``docs/``) that explains it."""

    file: str
    title: str
    shows: str
    call: str
    page: str


PICTURES = [
    Picture(
        "sum_of_parts.svg",
        "One head as a sum",
        "The scores of L16H0 of SmolLM2-135M equal a map of the distance, one of the query, one of the key, and a "
        "residual.",
        'fit_additive(cache["attn_scores", 16]).to_frame()',
        "where_or_what.md",
    ),
    Picture(
        "gallery_parts.png",
        "The same as a widget",
        "Scores of one head on a text, and the components of their fit; pointing at a cell shows its query and key.",
        "show_parts(fit, tokens, head=2, scores=scores)",
        "widgets.md",
    ),
    Picture(
        "gallery_report.png",
        "A report on a model",
        "The atlas at the top of a report: every head by what its scores follow. A click on a head opens its panel.",
        'report(model, text, "report.html")',
        "report.md",
    ),
    Picture(
        "trained_and_random.svg",
        "Trained against random weights",
        "Four measures of additivity of SmolLM2-135M by layer, beside the range over five random copies of four kinds.",
        "additivity(copy, tokens) for copy in random_control(model, seeds=5)",
        "results.md",
    ),
    Picture(
        "heads.svg",
        "Every head",
        "The correlation of each head's scores with the additive fit, by layer and head.",
        'plot_heads(additivity(model, tokens), "r")',
        "plots.md",
    ),
    Picture(
        "distance.svg",
        "Distance profiles",
        "The distance component of eight heads over 512 distances; dotted lines are wavelengths of RoPE.",
        "plot_distance(fit_additive(scores), wavelengths=wavelengths)",
        "plots.md#profiles-and-shares",
    ),
    Picture(
        "shares.svg",
        "Shares of the variance",
        "What distance, query, key and their interactions explain of the scores at controlled distances.",
        "plot_shares(controlled_distance(model, tokens))",
        "plots.md#profiles-and-shares",
    ),
    Picture(
        "frequencies.svg",
        "Rotary frequencies",
        "The share of the distance in the scores, by wavelength and head.",
        'viz.plot_subspaces(subspace_patterns(model, tokens), "distance")',
        "position_in_scores.md#frequencies",
    ),
    Picture(
        "ablation.svg",
        "Head ablation",
        "The loss added by resampling the output of each head.",
        'plot_heads(head_ablation(model, tokens, mode="resample"), "effect", signed=True)',
        "head_ablation.md",
    ),
    Picture(
        "patching.svg",
        "Positions of one head",
        "How much of the loss each head restores if it alone gets the real positions.",
        'plot_heads(position_patching(model, tokens, positions), "effect", signed=True)',
        "patching.md",
    ),
    Picture(
        "gallery_loss.png",
        "An intervention, token by token",
        "The loss that each token gains if all keys of one layer are at distance 5.",
        "viz.show_loss_change(model, tokens, dummy_distance(model, 5, layers=4))",
        "widgets.md",
    ),
    Picture(
        "substitution.svg",
        "Attention from the components alone",
        "The loss added if the scores keep only some components of their fit.",
        "viz.plot_substitution(additive_substitution(model, tokens))",
        "additive_substitution.md",
    ),
    Picture(
        "perturbation.svg",
        "Scrambled words",
        "The loss added by words that change places, by the fraction of words.",
        "viz.plot_perturbation(perturbation_curve(model, tokens))",
        "position_interventions.md#perturbed-word-order-positions-and-features",
    ),
    Picture(
        "length.svg",
        "Beyond the training length",
        "Loss and largest score by position, as the model is and with two remedies.",
        'viz.plot_length(length_generalization(model, tokens, edges), ["loss", "largest_score"])',
        "length_generalization.md",
    ),
    Picture(
        "drops.svg",
        "Positional deposit",
        "The accuracy lost without each head, of small models with five encodings of position on one task.",
        "synthetic.head_drops(model, tokens, labels)",
        "deposit.md",
    ),
    Picture(
        "dynamics.svg",
        "Heads during training",
        "The gradient for a distance profile, of each head of three layers, over 300 steps.",
        'viz.plot_dynamics(synthetic.dynamics(models, task), "norm_of_mean")',
        "training_dynamics.md",
    ),
]


def page() -> str:
    """The page as it is committed."""
    parts = [
        f"## {x.title}\n\n{x.shows}\n\n![{x.title}](figures/{x.file})\n\n`{x.call}` · [more]({x.page})\n"
        for x in PICTURES
    ]
    return "\n".join([START, *parts])


def draw() -> None:
    """Widgets and the report of the demo model, as a browser shows them."""
    import notebooks  # needs Playwright and Pillow

    import tl_posdisent as tp

    model, tokens, longer = tp.load_demo_model(), tp.demo_tokens(length=28), tp.demo_tokens(length=120)
    scores = model.run_with_cache(tokens)[1]["attn_scores", 3]
    words = model.to_str_tokens(tokens[0])
    widgets = {
        "gallery_parts": tp.show_parts(tp.fit_additive(scores), words, head=2, scores=scores),
        "gallery_loss": tp.viz.show_loss_change(model, longer, tp.dummy_distance(model, 5, layers=4)),
    }
    for name, image in zip(widgets, notebooks.screenshots([x._repr_html_() for x in widgets.values()]), strict=True):
        (FOLDER / f"{name}.png").write_bytes(notebooks.smaller(image))
    with tempfile.TemporaryDirectory() as folder:
        path = tp.report(model, tp.demo_text(), Path(folder, "report.html"))
        (FOLDER / "gallery_report.png").write_bytes(notebooks.smaller(atlas(path)))


def atlas(path: Path) -> bytes:
    """The first screen of a report."""
    import notebooks

    with notebooks.browser() as chromium:
        shown = chromium.new_page(viewport={"width": 1100, "height": 900})
        shown.goto(path.resolve().as_uri())
        shown.wait_for_timeout(3000)  # charts are drawn in several steps
        return bytes(shown.screenshot())


if __name__ == "__main__":
    if sys.argv[1:] != ["page"]:
        draw()
    PAGE.write_text(page(), encoding="utf-8")
