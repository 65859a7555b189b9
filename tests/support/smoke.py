"""Test an installed wheel, without the sources, a network or packages beyond its dependencies.

Run it before a release, in an environment of its own: ``python -I tests/support/smoke.py`` prints what it measured.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

import torch

import tl_posdisent as tp

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> str:
    """Run the installed `tl-posdisent` in an empty folder and return its output."""
    program = Path(sys.executable).with_name("tl-posdisent")
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run([str(program), *arguments], cwd=empty, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    home = Path(tp.__file__).resolve().parent
    assert ROOT not in home.parents or "site-packages" in home.parts, f"{home} is the source tree, not an installation"
    assert metadata.version("tl-posdisent") == tp.__version__
    package = resources.files("tl_posdisent")
    assert package.joinpath("py.typed").is_file(), "type checkers would ignore the annotations"

    # The embedded model in the class that every TransformerLens has, and the main job of the package on it.
    model, tokens = tp.load_demo_model(backend="bridge"), tp.demo_tokens(length=256)
    with torch.no_grad():
        loss, cache = model.run_with_cache(tokens, return_type="loss")
    fit = tp.fit_additive(cache["attn_scores", 3])
    assert 3 < float(loss) < 4.5, f"the embedded model is trained, yet its loss is {float(loss):.2f}"
    assert 0.8 < float(fit.r.mean()) < 1, f"r {float(fit.r.mean()):.2f}"
    with torch.no_grad(), tp.hooks.applied(model, tp.dummy_distance(model, 5)):
        assert float(model(tokens, return_type="loss")) > float(loss) + 0.3

    # The command line: its name, its version, a table in a file.
    assert tp.__version__ in command("--version")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fit.csv"
        command("fit", "--model", "demo", "--texts", "2", "--out", str(out))
        table = out.read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 2 * 2 * 5 * 8, "two texts, five layers of eight heads, and the same with random weights"
    seen = {
        "version": tp.__version__,
        "from": str(home),
        "loss": round(float(loss), 3),
        "mean r of layer 3": round(float(fit.r.mean()), 3),
        "rows of fit.csv": len(table) - 1,
    }
    sys.stdout.write("\n".join(f"{name:>18}  {value}" for name, value in seen.items()) + "\n")


if __name__ == "__main__":
    main()
