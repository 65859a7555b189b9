"""The numbers of small models that learn a synthetic task, in training: ``tables/synthetic.csv``.

    python docs/findings/training.py                 # all studies, about 10 minutes of one core
    python docs/findings/training.py toeplitz        # some of them

Models of the ``small`` preset learn the distance of two triggers with one position encoding each; ``displaced`` trains
hybrids of six layers of 16 heads. A study that runs again replaces its own rows.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rows import Row, row, write
from torch import Tensor

from tl_posdisent.experiments import content_position_terms, positional_subspace, rope_hadamard
from tl_posdisent.rope import principal_angles, toeplitz_share
from tl_posdisent.synthetic import (
    Preset,
    SyntheticModel,
    evaluate,
    gradient_margins,
    head_drops,
    positional_gradients,
    preset,
    train,
)
from tl_posdisent.synthetic.tasks.task import long_texts

TABLE = Path(__file__).with_name("tables") / "synthetic.csv"
ANGLES = Path(__file__).parents[1] / "figures" / "displaced_subspace.csv"
SMALL, MEDIUM = preset("small"), preset("medium")
TASK = SMALL.tasks["distance"]
NAMES = {"rope": "RoPE", "alibi": "ALiBi", "none": "no positions", "t5": "T5", "learned": "absolute"}
STEPS = (0, 50, 100, 300)
SEEDS, TRAINED = range(5), {"rope": range(4), "alibi": range(3), "none": range(3), "t5": range(2), "learned": range(2)}
BATCHES: dict[str, Any] = {"batches": 32, "batch_size": 64, "progress": False}


def models_in_training(
    sizes: Preset, encoding: str, task: str, seed: int, steps: Sequence[int]
) -> tuple[dict[int, SyntheticModel], float]:
    """Train a model; return copies of it after these steps, and its accuracy on new texts after the last one."""
    model = sizes.model(encoding, task, seed)
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: SyntheticModel) -> None:
        if step in steps:
            models[step] = copy.deepcopy(model).eval()

    run = train(model, sizes.tasks[task], sizes.train_config(task, seed), on_step=keep, progress=False)
    return models | {run.steps: run.model}, run.test_accuracy


@cache
def trained(encoding: str, seed: int) -> tuple[dict[int, SyntheticModel], float]:
    return models_in_training(SMALL, encoding, "distance", seed, STEPS)


@cache
def gradients(encoding: str, seed: int, step: int) -> pd.DataFrame:
    return positional_gradients(trained(encoding, seed)[0][step], TASK, **BATCHES | {"batches": 16})


def initial() -> Iterator[Row]:
    """The expected gradient for the positional part of a head's scores, before training; 0 if batches cancel."""
    samples = TASK.batch(BATCHES["batches"] * BATCHES["batch_size"], seed=1)
    order = torch.randperm(len(samples[1]), generator=torch.Generator().manual_seed(1))
    pairs = [("distance", name) for name in NAMES] + [("encoding", name) for name in ("rope", "alibi", "t5")]
    for part, encoding in pairs:
        for labels, answers in {"": samples[1], ", shuffled labels": samples[1][order]}.items():
            tables = [
                positional_gradients(
                    SMALL.model(encoding, "distance", seed), (samples[0], answers), part=part, **BATCHES
                )
                for seed in SEEDS
            ]
            name, call = f"{part}, {NAMES[encoding]}{labels}", f"positional_gradients(part='{part}')"
            for column in ("mean_norm", "expected_norm"):
                yield row(f"{column} in thousandths, {name}", 1000 * of_seeds(tables, column), 0, call, "seeds")
            fraction = torch.tensor([(t["expected_norm"] / t["mean_norm"]).mean() for t in tables])
            yield row(f"expected over mean norm, {name}", fraction, 0, call, "seeds")
            above = torch.tensor([(t["expected_norm"] > 2 * t["expected_norm_se"]).mean() for t in tables])
            yield row(f"share of heads above two errors, {name}", above, 0, call, "seeds")
            least = torch.tensor([(t["expected_norm"] / t["mean_norm"]).min() for t in tables]).min().item()
            yield Row(f"least of heads, expected over mean norm, {name}", least, torch.nan, "60 heads", 0, call)


def of_seeds(tables: list[pd.DataFrame], column: str) -> Tensor:
    return torch.tensor([table[column].mean() for table in tables])


def margins() -> Iterator[Row]:
    """The margin of the head with the largest gradient in each layer, while models learn."""
    for encoding in ("rope", "alibi", "none"):
        for step in STEPS:
            tables = [gradient_margins(gradients(encoding, seed, step)) for seed in TRAINED[encoding]]
            name, call = f"{NAMES[encoding]}, step {step}", "gradient_margins(positional_gradients(...))"
            margin = torch.stack([torch.tensor(table["margin"].to_numpy()) for table in tables])
            error = torch.stack([torch.tensor(table["margin_se"].to_numpy()) for table in tables])
            largest = torch.stack([torch.tensor(table["largest"].to_numpy()) for table in tables])
            for layer in range(margin.shape[1]):
                yield row(f"margin in thousandths, layer {layer}, {name}", 1000 * margin[:, layer], 0, call, "seeds")
                share = margin[:, layer] / largest[:, layer]
                yield row(f"margin over largest, layer {layer}, {name}", share, 0, call, "seeds")
            falls = (margin[:, :-1] > margin[:, 1:]).all(1).double()
            yield row(f"share of seeds in which margins grow downwards, {name}", falls, 0, call, "seeds")
            clear = (margin > 2 * error).double().mean(1)
            yield row(f"share of margins above two errors, {name}", clear, 0, call, "seeds")


def leading() -> Iterator[Row]:
    """Whether the head with the largest gradient in training has the largest drop at the end."""
    models = [trained("rope", seed)[0][STEPS[-1]] for seed in TRAINED["rope"]]
    tokens, labels = TASK.batch(1000, seed=99)
    drops = [head_drops(model, tokens, labels, mode="zero", progress=False) for model in models]
    last = [table.loc[table["effect"].idxmin(), ["layer", "head"]].tolist() for table in drops]
    for step in STEPS:
        tables = [gradients("rope", seed, step) for seed in TRAINED["rope"]]
        first = [table.loc[table["norm_of_mean"].idxmax(), ["layer", "head"]].tolist() for table in tables]
        same = torch.tensor([float(a == b) for a, b in zip(first, last, strict=True)])
        yield row(f"largest gradient and largest drop in one head, step {step}", same, 0, "head_drops(...)", "seeds")


def accuracy() -> Iterator[Row]:
    """Accuracy on new texts after training."""
    for encoding, seeds in TRAINED.items():
        right = torch.tensor([trained(encoding, seed)[1] for seed in seeds])
        yield row(f"accuracy, {NAMES[encoding]}", right, 0, "train_preset(...)", "seeds")


def toeplitz() -> Iterator[Row]:
    """How much of the scores, and of their terms of content and position, is a function of the distance."""
    texts = long_texts(TASK, 64)
    for encoding, seeds in TRAINED.items():
        for state, step in {"untrained": 0, "trained": STEPS[-1]}.items():
            models = [trained(encoding, seed)[0][step] for seed in seeds]
            split = [
                [content_position_terms(model, texts, layer, grand_mean="bias") for layer in range(3)]
                for model in models
            ]
            name = f"{NAMES[encoding]}, {state}"
            whole = torch.stack([of_scores([(x.scores(), x.mask) for x in layers]) for layers in split])
            yield row(f"toeplitz, scores, {name}", whole, len(texts[0]), "toeplitz_share(...)", "seeds")
            yield from terms(split, name, len(texts[0]))
            if encoding == "rope":
                forms = [[rope_hadamard(model, texts, layer) for layer in range(3)] for model in models]
                before = torch.stack([of_scores([(x.content(), x.mask) for x in layers]) for layers in forms])
                yield row(
                    f"toeplitz, scores before rotation, {name}", before, len(texts[0]), "rope_hadamard(...)", "seeds"
                )


def of_scores(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean over layers and heads of what one function of the distance explains of scores of all texts."""
    return torch.stack([toeplitz_share(scores, mask=mask, pool=True).nanmean() for scores, mask in layers]).mean()


def terms(split: list[list[Any]], name: str, length: int) -> Iterator[Row]:
    """Sizes of terms, and how far each is a function of the distance: mean over heads of all layers."""
    tables = [
        pd.concat([x.to_frame() for x in layers]).groupby("term")[["size", "toeplitz"]].mean() for layers in split
    ]
    for term in ("content:content", "content:position", "position:position", "attention bias"):
        for column in ("size", "toeplitz"):
            values = torch.tensor([table.loc[term, column] for table in tables])
            if bool(values.isfinite().all()):
                yield row(f"{column}, {term}, {name}", values, length, "content_position_terms(...)", "seeds")


def angles() -> Iterator[Row]:
    """How far the positional subspace moves from that of the embedded text: hybrids, absolute positions alone, and both
    before training, of six layers of 16 heads (``docs/figures/deposit_96_heads.py``)."""
    table = pd.read_csv(ANGLES)
    names = {"sinusoidal": "absolute", "sinusoidal_rope": "hybrid"}
    for (encoding, state, layer), part in table.groupby(["encoding", "model", "layer"]):
        name = f"before layer {layer}, {names[encoding]}, {'untrained' if state == 'new' else state}"
        for label, column in (("largest", "angle0"), ("second", "angle1"), ("smallest", "angle3")):
            yield row(
                f"{label} of four angles {name}",
                torch.tensor(part[column].to_numpy()),
                0,
                "principal_angles(...)",
                "models",
            )


def displaced() -> Iterator[Row]:
    """The positional subspace of hybrids while they learn, when they are as accurate as absolute positions and after,
    with subspaces of two to eight directions."""
    task, found = MEDIUM.tasks["gap8"], []
    texts = long_texts(task, 256)
    for seed in range(2):
        models, _ = models_in_training(MEDIUM, "sinusoidal_rope", "gap8", seed, range(0, 251, 50))
        for step, model in models.items():
            found.append({"step": step, "accuracy": evaluate(model, *task.batch(1000, seed=99))[1]})
            for rank in (2, 4, 8):
                bases = [positional_subspace(model, texts, layer, rank=rank).basis for layer in (0, 1, 2, 3, 5)]
                turned = [principal_angles(bases[0], basis).rad2deg().max().item() for basis in bases[1:]]
                names = [f"largest of {rank} angles before layer {layer}" for layer in (1, 2, 3, 5)]
                found[-1] |= dict(zip(names, turned, strict=True))
    for step, part in pd.DataFrame(found).groupby("step"):
        for column in part.columns.drop("step"):
            values = torch.tensor(part[column].to_numpy())
            yield row(f"{column}, hybrid, step {step}", values, 0, "positional_subspace(...)", "seeds")


STUDIES = {study.__name__: study for study in (initial, accuracy, margins, leading, toeplitz, angles, displaced)}


def main(studies: list[str]) -> None:
    """Run studies, print their rows and write them."""
    for study in studies:
        start, rows = time.monotonic(), []
        for each in STUDIES[study]():
            rows.append(each)
            print(f"{study}: {each.name}: {each.value:.3f} ± {each.error:.3f} ({each.over})", flush=True)
        write(TABLE, study, rows, [*STUDIES])
        print(f"{study}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(STUDIES))
