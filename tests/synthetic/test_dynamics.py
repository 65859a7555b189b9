"""Tables over the steps of a training are those of the tools at each step."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
import torch
from support.small_models import small_model

from tl_posdisent import additivity, controlled_distance, disentanglement
from tl_posdisent.synthetic import (
    SyntheticModel,
    dynamics,
    gradient_margins,
    positional_gradients,
    preset,
    train,
)
from tl_posdisent.synthetic.tasks.task import long_texts

TOKENS = torch.randint(1, 20, (12, 9), generator=torch.Generator().manual_seed(3))
TOKENS[::3, 6:] = 0
LABELS = torch.arange(12) % 5
NAMES = ["mean_norm", "norm_of_mean", "expected_norm"]


def test_disentanglement_is_that_of_the_tools() -> None:
    tokens = TOKENS[1:3]
    for encoding in ("rope", "learned"):
        model = small_model(encoding=encoding, pad_id=0)
        table = disentanglement(model, tokens, progress=False)
        fitted = additivity(model, tokens, pool=True, progress=False)
        assert table["r"].tolist() == fitted["r"].tolist()
        if encoding == "learned":
            assert bool(table[["r_three_axis", "r_two_axis"]].isna().all(axis=None))
            continue
        controlled = controlled_distance(model, tokens, distances=range(-8, 9), progress=False)  # it sees both ways
        for name in ("r_three_axis", "r_two_axis"):
            assert table[name].tolist() == pytest.approx(controlled[name].tolist(), abs=1e-6)


TASK = preset("small").tasks["distance"]


@pytest.fixture(scope="module")
def models() -> dict[int, SyntheticModel]:
    small = preset("small")
    model = small.model("rope", "distance", n_layers=2, n_train=512, n_test=64)
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: SyntheticModel) -> None:
        models[step] = copy.deepcopy(model)

    train(model, TASK, on_step=keep, progress=False)
    return {step: models[step] for step in (4, 0, 3)}


def test_dynamics_are_the_measures_of_every_step(models: dict[int, SyntheticModel]) -> None:
    """Copies that are kept in training have dropout switched on, as the model has: it is measured without."""
    assert models[3].training
    table = dynamics(models, TASK, texts=4, batches=2, batch_size=8, seed=1, progress=False)
    assert table.groupby("step", sort=False).size().to_dict() == {0: 8, 3: 8, 4: 8}
    tokens = long_texts(TASK, 4, seed=1)
    for step in (0, 4):
        rows, model = table[table["step"] == step].reset_index(drop=True), models[step].eval()
        gradients = positional_gradients(model, TASK, batches=2, batch_size=8, seed=1, progress=False)
        pd.testing.assert_frame_equal(rows[NAMES], gradients[NAMES])
        pd.testing.assert_frame_equal(rows[["r"]], disentanglement(model, tokens, progress=False)[["r"]])
    assert bool((table[table["step"] == 0]["r"].to_numpy() != table[table["step"] == 4]["r"].to_numpy()).all())
    margins = gradient_margins(table)
    assert margins[["step", "layer"]].values.tolist() == [[step, layer] for step in (0, 3, 4) for layer in (0, 1)]
