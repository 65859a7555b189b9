"""Train small models on the distance of two triggers, and relate their deposit to their accuracy on longer texts.

``python docs/figures/deposit_and_length.py FOLDER`` trains and measures models in one thread, one row of
``deposit_and_length.csv`` beside this script each, and goes on where it was stopped. ``… FOLDER finish`` prints the
tables, of which the page shows a part, and needs no models.

The task has 8 distances and 1 to 4 fillers on each side, in texts of 5 to 18 tokens. The longer texts ask for the same
distances: there are ``more`` fillers before the first trigger, and as many more after the second one, so that the
longest text has 1.5 and 2 times the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import resumed
from scipy import stats

from tl_posdisent.synthetic import TriggerDistance, deposit, evaluate, head_drops, preset, train_preset

TABLE = Path(__file__).with_name("deposit_and_length.csv")
SMALL = preset("small")
TASK = TriggerDistance(d_vocab=32, max_gap=8, max_side=4, n_ctx=18)
STUDY = replace(SMALL, tasks={"gap8": TASK}, training=replace(SMALL.training, n_train=32_000, n_test=1_000))
MORE = {"1": 0, "1.25": 2, "1.5": 4, "2": 9}  # fillers added on each side; longest texts of 18, 22, 26 and 36 tokens
TEXTS = 1_000  # not seen in training: of another seed
KEY = ["encoding", "rotary_heads", "seed"]
Model = tuple[str, int, int]


def models() -> list[Model]:
    """Rotation alone and the hybrid with one to all of four rotary heads in each layer, and MLA with three seeds."""
    return [each for round_ in range(4) for each in _of_round(round_)]


def _of_round(number: int) -> Iterator[Model]:
    for encoding in ("rope", "sinusoidal_rope"):
        yield from ((encoding, heads, number) for heads in (1, 2, 3, 4))
    yield from (("mla", 4, seed) for seed in range(3 * number, 3 * number + 3))


def longer(more: int) -> TriggerDistance:
    """The task with so many fillers more on each side."""
    sides = {"min_side": TASK.min_side + more, "max_side": TASK.max_side + more}
    return replace(TASK, **sides, n_ctx=TASK.n_ctx + 2 * more)


def row_of(key: Model, folder: Path) -> dict[str, Any]:
    """Train one model; measure its loss and accuracy at each length, and its deposit at the length of training."""
    encoding, heads, seed = key
    changed = {} if encoding == "mla" else {"rotary_heads": heads}
    where = folder / f"trainings-{heads}-rotary"
    options: dict[str, Any] = {"encodings": [encoding], "tasks": ["gap8"], "seeds": [seed], "folder": where}
    (run,) = train_preset(STUDY, **options, **changed, progress=False).values()
    row: dict[str, Any] = dict(zip(KEY, key, strict=True))
    for name, more in MORE.items():
        row[f"loss_{name}"], row[f"accuracy_{name}"] = evaluate(run.model, *longer(more).batch(TEXTS, seed=99))
    tokens, labels = TASK.batch(TEXTS // 2, seed=98)
    for mode in ("zero", "mean"):
        drops = head_drops(run.model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, of in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            for name in ("drop", "second", "share", "effective_heads", "layer"):
                row[f"{mode}_{of}_{name}"] = getattr(report, name)
    return row


def finished() -> pd.DataFrame:
    """All models that were measured, one row each."""
    return resumed.finished(TABLE, KEY)


def main(folder: Path) -> None:
    resumed.fill(TABLE, KEY, models(), lambda key: row_of(key, folder))


# More concentrated is larger in both: the share of the largest drop, and fewer effective heads.
CONCENTRATION = {"share": 1, "effective_heads": -1}
WITHIN = ["encoding", "rotary_heads"]
NAMES = {"rope": "rotation alone", "sinusoidal_rope": "hybrid", "mla": "MLA"}


CONTROLS = ("all models", "same accuracy and loss", "and same kind")


def partial_rank(x: np.ndarray, y: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """Rank correlation of x and y ``[…, model]`` after a regression of both ranks on a constant and on ``controls``
    ``[…, model, control]``; NaN where the controls leave nothing of x or y."""
    basis = np.concatenate([np.ones((*x.shape, 1)), controls], -1)
    ranks = np.stack([stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)], -1)
    rest = ranks - basis @ (np.linalg.pinv(basis, rcond=1e-10) @ ranks)
    norms = np.linalg.norm(rest, axis=-2)
    norms[norms < 1e-6] = np.nan
    return np.asarray((rest[..., 0] * rest[..., 1]).sum(-1) / norms.prod(-1))


def controls(name: str, accuracy: np.ndarray, loss: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """What is held constant, one column each ``[…, model, control]``.

    Ranks of accuracy and loss at the length of training (nearly all accuracies are 1, and no two losses are equal);
    and a constant for each encoding and number of rotary heads, numbered from 0 by ``kind``.
    """
    if name == "all models":
        return np.empty((*loss.shape, 0))
    trained = np.stack([stats.rankdata(accuracy, axis=-1), stats.rankdata(loss, axis=-1)], -1)
    if name == "same accuracy and loss":
        return trained
    return np.concatenate([trained, kind[..., None] == np.arange(1, kind.max() + 1)], -1)


def interval(table: pd.DataFrame, x: str, y: str, control: str, draws: int = 1_000) -> tuple[float, float, float]:
    """Rank correlation of two columns, and its 95 % interval from models drawn with replacement."""
    every = np.arange(len(table))
    drawn = np.random.default_rng(0).integers(len(table), size=(draws, len(table)))
    kind = table.groupby(WITHIN).ngroup().to_numpy()
    values = [table[name].to_numpy(float) for name in (x, y, "accuracy_1", "loss_1")]

    def found(chosen: np.ndarray) -> np.ndarray:
        first, second, accuracy, loss = (value[chosen] for value in values)
        return partial_rank(first, second, controls(control, accuracy, loss, kind[chosen]))

    low, high = np.nanquantile(found(drawn), [0.025, 0.975])
    return float(found(every)), float(low), float(high)


def permuted(table: pd.DataFrame, x: str, y: str, draws: int = 2_000) -> float:
    """Share of permutations of x within each kind of model with a correlation at least as large, all else the same."""
    kind = table.groupby(WITHIN).ngroup().to_numpy()
    first, second, accuracy, loss = (table[name].to_numpy(float) for name in (x, y, "accuracy_1", "loss_1"))
    # Sorted by kind and, within each, at random: the values that the places of a kind get.
    keys = np.random.default_rng(1).random((draws, len(table))) + kind
    shuffled = np.empty((draws, len(table)))
    np.put_along_axis(shuffled, kind.argsort(kind="stable")[None].repeat(draws, 0), first[keys.argsort(-1)], -1)
    columns = controls(CONTROLS[-1], accuracy, loss, kind)
    found = partial_rank(shuffled, second[None].repeat(draws, 0), columns[None].repeat(draws, 0))
    own = abs(float(partial_rank(first, second, columns)))
    return float((1 + (abs(found) >= own - 1e-9).sum()) / (1 + draws))


def correlations(table: pd.DataFrame, of: str = "accuracy") -> pd.DataFrame:
    """Rank correlation of a deposit's concentration and accuracy on longer texts, one row per measure and length."""
    rows = []
    for mode in ("zero", "mean"):
        for measure, sign in CONCENTRATION.items():
            known = table.assign(x=sign * table[f"{mode}_{of}_{measure}"]).dropna(subset="x")
            for length in ("1.5", "2"):
                words = "zeroed" if mode == "zero" else "mean", measure.replace("_", " ").replace("eff", "fewer eff")
                row = dict(zip(("heads", "concentration"), words, strict=True)) | {"length": length}
                for name in CONTROLS:
                    row[name] = "{:+.2f} ({:+.2f}, {:+.2f})".format(*interval(known, "x", f"accuracy_{length}", name))
                row["permuted within kinds: p"] = f"{permuted(known, 'x', f'accuracy_{length}'):.2f}"
                rows.append(row)
    return pd.DataFrame(rows)


def on_the_page(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``correlations`` that the page shows: the share of the largest drop, at 1.5 times the length."""
    shown = table.query("concentration == 'share' and length == '1.5'")
    return shown.drop(columns=["concentration", "length", CONTROLS[0]])


def by_encoding(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the models of an encoding ± their standard deviation."""
    columns = {f"accuracy_{length}": f"accuracy at {length} times the length" for length in ("1", "1.5", "2")}
    rows = []
    for encoding, models in table.groupby("encoding"):
        row = {"encoding": NAMES[str(encoding)], "models": len(models)}
        for name, shown in columns.items():
            row[shown] = f"{models[name].mean():.2f}±{models[name].std():.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    if sys.argv[2:] == ["finish"]:
        for shown in (by_encoding(finished()), correlations(finished()), correlations(finished(), of="loss")):
            print(shown.to_string(index=False))
        for encoding, models_of in finished().groupby("encoding"):
            print(encoding, correlations(models_of).iloc[:, :5].to_string(index=False), sep="\n")
    else:
        main(Path(sys.argv[1]))
