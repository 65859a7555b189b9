"""*Where* and *what*: constructed heads are recognised, random weights are hardly ever decided."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import tl_posdisent as tp
from tl_posdisent.page.deciding.where_or_what import AS_RANDOM, DIFFERENCE, ERROR, KINDS, OVER_RANDOM, looks_at

TOKENS = tp.demo_tokens(length=6 * 64 + 1)[:, 1:].view(6, 64)


def additivity(model: Any) -> pd.DataFrame:
    return tp.additivity(model, TOKENS, progress=False)


@functools.cache
def copy_of(seed: int) -> pd.DataFrame:
    """The table of a random copy of the demo model."""
    return additivity(next(tp.random_control(tp.load_demo_model(), [seed]))).assign(seed=seed)


def replaced(scores: torch.Tensor, hook: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Head 1 has scores of the distance alone, head 2 of the key's token alone; noise is a tenth of them."""
    n = scores.shape[-1]
    distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    noise = 0.1 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    scores = scores.clone()
    scores[:, 1] = torch.where(scores[:, 1] > -1e4, distance.float().add(1).log() + noise[:, 1], scores[:, 1])
    scores[:, 2] = torch.where(scores[:, 2] > -1e4, values[tokens][:, None, :] + noise[:, 2], scores[:, 2])
    return scores


@pytest.mark.parametrize("n", [0, 1, 3])
def test_heads_of_the_distance_are_where_and_heads_of_the_key_are_what(n: int) -> None:
    model = tp.load_demo_model()
    hook = ("blocks.2.attn.hook_attn_scores", partial(replaced, tokens=TOKENS))
    with model.hooks(fwd_hooks=[hook]):
        trained = additivity(model)
    looks = looks_at(trained, pd.concat(map(copy_of, range(n))) if n else None).set_index(["layer", "head"])
    assert looks.loc[(2, 1), "looks"] == "where"
    assert looks.loc[(2, 2), "looks"] == "what"
    assert looks.loc[(2, 1), DIFFERENCE] < -0.7
    assert looks.loc[(2, 2), DIFFERENCE] > 0.7
    assert looks["looks"].isin(KINDS).all()
    assert len(looks) == 40


@pytest.mark.slow
@pytest.mark.parametrize(("n", "rate"), [(1, 0.05), (3, 0.02)])
def test_random_weights_are_hardly_ever_decided(n: int, rate: float) -> None:
    """Each of eight random copies, compared with others; by the interval alone, a quarter were decided."""
    copies, decided, by_sign = [copy_of(seed) for seed in range(8)], [], []
    for k, copy in enumerate(copies):
        others = pd.concat([copies[(k + 1 + m) % len(copies)] for m in range(n)])
        decided += looks_at(copy.drop(columns="seed"), others)["looks"].isin(["where", "what"]).tolist()
        by_sign += (looks_at(copy.drop(columns="seed"), None)["looks"] != "undecided").tolist()
    assert np.mean(decided) <= rate
    assert np.mean(by_sign) > 0.25


def simulated(seed: int, texts: int = 5, copies: int = 2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Heads whose difference is anywhere, random heads that lean to where in layer 0 and to what in layer 1."""
    rng = np.random.default_rng(seed)

    def table(means: np.ndarray) -> pd.DataFrame:
        rows = []
        for (layer, head), mean in np.ndenumerate(means):
            for batch, noise in enumerate(0.1 * rng.standard_normal(texts)):
                rows.append(
                    {
                        "batch": batch,
                        "layer": layer,
                        "head": head,
                        "share_distance": 0.5,
                        "share_key": 0.5 + mean + noise,
                    }
                )
        return pd.DataFrame(rows)

    trained = table(rng.uniform(-0.6, 0.6, (2, 12)))
    chance = [
        table(np.array([[-0.2], [0.2]]) + 0.1 * rng.standard_normal((2, 12))).assign(seed=n) for n in range(copies)
    ]
    return trained, pd.concat(chance, ignore_index=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_by_scipy(seed: int) -> None:
    """Decided by a t-test against the nearer of 0 and the outermost random head, head by head."""
    trained, random = simulated(seed)
    found = looks_at(trained, random).set_index(["layer", "head"])
    d = {table: frame["share_key"] - frame["share_distance"] for table, frame in {"t": trained, "r": random}.items()}
    counts = dict.fromkeys(KINDS, 0)
    for (layer, head), row in found.iterrows():
        values = d["t"][(trained["layer"] == layer) & (trained["head"] == head)]
        of_layer = random["layer"] == layer
        chance = d["r"][of_layer].groupby([random["seed"][of_layer], random["head"][of_layer]]).mean()
        below = stats.ttest_1samp(values, min(0, chance.min()), alternative="less").pvalue
        above = stats.ttest_1samp(values, max(0, chance.max()), alternative="greater").pvalue
        beyond = stats.ttest_1samp(values, 0).pvalue <= 0.05
        kind = "where" if below <= 0.025 else "what" if above <= 0.025 else AS_RANDOM if beyond else "undecided"
        assert row["looks"] == kind
        counts[kind] += 1
        assert row[DIFFERENCE] == pytest.approx(values.mean())
        assert row[ERROR] == pytest.approx(stats.sem(values))
        assert row[OVER_RANDOM] == pytest.approx(values.mean() - chance.mean())
    assert sum(counts.values()) == len(found) == 24
    assert min(counts.values()) > 0


def test_what_cannot_be_known_is_undecided_or_has_no_answer() -> None:
    """A single text has no error; heads without numbers are no baseline; constant scores have no answer."""
    trained, random = simulated(0)
    assert set(looks_at(trained[trained["batch"] == 0], random)["looks"]) == {"undecided"}
    nothing = random.assign(share_key=np.where(random["layer"] == 0, np.nan, random["share_key"]))
    by_layer = looks_at(trained, nothing).groupby("layer")["looks"].unique()
    assert set(by_layer[0]) == {"undecided"} < set(by_layer[1])
    constant = trained.assign(share_key=np.where(trained["head"] == 3, np.nan, trained["share_key"]))
    looks = looks_at(constant, random)
    assert (looks["looks"] == "–").tolist() == (looks["head"] == 3).tolist()
