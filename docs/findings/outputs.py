"""Do attention outputs leave their region beyond the training length? ``tables/demo_length.csv``, ``story_length.csv``.

``python docs/findings/outputs.py`` takes ten minutes of one core. The same tokens, the last of a text, are read behind
more or less of it, or at other positions behind the same tokens. A step within the training length is the control for
one beyond it. The story model is read from the folder ``POSDISENT_DATA`` (``docs/figures/stories.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rows import Row, area, row
from texts import parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

TEXTS, FOLDS = 16, 4
COMPARED, HALF, TRAINED, FARTHER, BEYOND = 192, 256, 512, 768, 1024  # tokens
Outputs = tuple[Tensor, Tensor]  # [layer, text, pos, coordinate], and the loss of each text
Score = Callable[[Tensor], Tensor]


def outputs(model: Any, texts: Tensor, compared: int, hooks: Any = ()) -> Outputs:
    """Attention outputs at the last tokens of texts, and the loss of these tokens."""
    kept: list[Tensor] = []
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    watch = [(name, lambda z, hook: kept.append(z[0, -compared:])) for name in names]
    losses = []
    with torch.no_grad(), applied(model, [*hooks, *watch]):
        for text in texts:
            logits = model(text[None])[0, -compared - 1 : -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, text[-compared:]))
    z = torch.stack(kept).unflatten(0, (len(texts), -1)).transpose(0, 1)
    return z.flatten(3), torch.stack(losses)


def last(texts: Tensor, length: int) -> Tensor:
    """BOS and the last tokens of each text."""
    return torch.cat([texts[:, :1], texts[:, 1 - length :]], 1)


def positions(length: int, compared: int, gap: int) -> Tensor:
    """Those of a text whose last tokens come a gap later; the keys stay the same."""
    p = torch.arange(length)
    return p + gap * (p >= length - compared)


def covariance(z: Tensor) -> Tensor:
    """With a twentieth of the mean variance in every direction."""
    c = torch.cov(z.T)
    return 0.95 * c + 0.05 * c.diagonal().mean() * torch.eye(len(c), dtype=c.dtype)


def scores(near: Tensor, far: Tensor) -> tuple[Score, Score]:
    """The linear discriminant of two sets of outputs, and the Mahalanobis distance from the first set."""
    mean, own = near.mean(0), covariance(near)
    axis = torch.linalg.solve(own + covariance(far), far.mean(0) - mean)
    inverse = torch.linalg.inv(own)
    return lambda z: z @ axis, lambda z: (((z - mean) @ inverse) * (z - mean)).sum(1)


def areas(near: Tensor, far: Tensor) -> Tensor:
    """``[score, layer, text]``: how well scores fitted to other texts tell a text's far outputs from its near ones."""
    n_layers, n, compared, _ = near.shape
    found, fold, is_far = torch.zeros(2, n_layers, n), torch.arange(n) % FOLDS, torch.arange(2 * compared) >= compared
    for layer, of in torch.cartesian_prod(torch.arange(n_layers), fold.unique()):
        fitted = scores(*(z[layer, fold != of].flatten(0, 1).double() for z in (near, far)))
        for text in (fold == of).nonzero()[:, 0]:
            both = torch.cat([near[layer, text], far[layer, text]]).double()
            for n_score, score in enumerate(fitted):
                found[n_score, layer, text] = area(score(both).numpy(), is_far.numpy())
    return found


def compare(name: str, near: Outputs, far: Outputs, length: int) -> Iterator[Row]:
    """The loss added, and the areas in the layers of lowest and of highest mean."""
    yield row(f"loss added, {name}", far[1] - near[1], length, "hook_z of the same tokens")
    for score, by_layer in zip(("probe", "distance"), areas(near[0], far[0]), strict=True):
        order = by_layer.mean(1).argsort()
        for which, layer in (("lowest", order[0]), ("highest", order[-1])):
            yield row(f"{score}, {name}, {which} layer", by_layer[layer], length, f"hook_z, layer {layer}")


def study(model: Any, texts: Tensor) -> Iterator[Row]:
    """Rows of a model with ``TRAINED`` positions."""

    def run(length: int, hooks: Any = ()) -> Outputs:
        return outputs(model, last(texts, length), COMPARED, hooks)

    def gap(size: int) -> Any:
        return tp.swap_positions(model, positions(HALF, COMPARED, size))

    ceiling = tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1))
    window = tp.lambda_mask(model, 4, HALF, HALF)
    halved = tp.position_interpolation(model, BEYOND / TRAINED)
    early, near, farther, far = (run(length) for length in (HALF, TRAINED, FARTHER, BEYOND))
    to_512, to_768, to_1024 = (run(HALF, gap(end - HALF)) for end in (TRAINED, FARTHER, BEYOND))
    masked_near, masked = run(TRAINED, window), run(BEYOND, window)
    pairs = {
        "256 and 512 tokens": (early, near),
        "512 and 768 tokens": (near, farther),
        "512 and 1024 tokens": (near, far),
        "positions to 256 and to 512": (early, to_512),
        "positions to 512 and to 768": (to_512, to_768),
        "positions to 512 and to 1024": (to_512, to_1024),
        "512 and 1024 tokens, ceiling": (near, run(BEYOND, ceiling)),
        "512 and 1024 tokens, Λ-mask": (near, masked),
        "512 and 1024 tokens, Λ-mask in both": (masked_near, masked),
        "512 tokens, without and with Λ-mask": (near, masked_near),
        "512 and 1024 tokens, positions halved": (near, run(BEYOND, halved)),
    }
    for name, (a, b) in pairs.items():
        yield from compare(name, a, b, BEYOND)


def cases() -> Iterator[tuple[str, Any, Tensor]]:
    """The demo model with speeches, the story model with texts of three stories that it generated."""
    sys.path.append(str(Path(__file__).parents[1] / "figures"))
    import stories

    demo = tp.load_demo_model(backend="bridge")
    yield "demo", demo, parts(demo, "speeches", TEXTS, BEYOND)
    torch.manual_seed(0)
    bos = torch.full((3 * TEXTS, 1), stories.BOS)
    wanted: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    samples = stories.stories_hf().generate(bos, min_new_tokens=499, max_new_tokens=499, **wanted)
    yield "story", stories.stories_bridge(), samples.reshape(TEXTS, -1)[:, :BEYOND]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case, *given in cases():
        table = pd.DataFrame(study(*given)).round(4)
        table.insert(0, "study", "outputs")
        table.to_csv(Path(__file__).parent / "tables" / f"{case}_length.csv", index=False)
