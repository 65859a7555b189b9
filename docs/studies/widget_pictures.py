"""Two widgets and the report of the demo model, as a browser shows them: ``docs/figures/gallery_*.png``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from shared.saving import FIGURES

import tl_posdisent as tp

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    """Write the pictures; needs Playwright, Pillow and Chromium."""
    import notebooks

    model, tokens, longer = tp.load_demo_model(), tp.demo_tokens(length=28), tp.demo_tokens(length=120)
    scores = model.run_with_cache(tokens)[1]["attn_scores", 3]
    widgets = {
        "parts": tp.show_parts(tp.fit_additive(scores), model.to_str_tokens(tokens[0]), head=2, scores=scores),
        "loss": tp.viz.show_loss_change(model, longer, tp.dummy_distance(model, 5, layers=4)),
    }
    for name, image in zip(widgets, notebooks.screenshots([x._repr_html_() for x in widgets.values()]), strict=True):
        (FIGURES / f"gallery_{name}.png").write_bytes(notebooks.smaller(image))
    with tempfile.TemporaryDirectory() as folder:
        path = tp.report(model, tp.demo_text(), Path(folder, "report.html"))
        (FIGURES / "gallery_report.png").write_bytes(notebooks.smaller(atlas(path)))


def atlas(path: Path) -> bytes:
    """The map and the table of all heads of a report."""
    import notebooks

    with notebooks.browser() as chromium:
        shown = chromium.new_page(viewport={"width": 1100, "height": 900})
        shown.goto(path.resolve().as_uri())
        shown.wait_for_timeout(3000)  # charts are drawn in several steps
        shown.evaluate("document.querySelector('#atlas').scrollIntoView()")
        return bytes(shown.screenshot())
