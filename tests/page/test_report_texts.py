"""A report of padded texts is that of the texts; its model is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.documents import Document, as_number
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.models.reading import model_reading
from tl_posdisent.synthetic import TriggerCount, dynamics
from tl_posdisent.synthetic.model.transformer import SyntheticModel

PADDED = [("bridge", "left"), pytest.param("hooked", "right", marks=zoo.needs_hooked)]
TEXTS = [tp.demo_tokens(length=61)[:, 1:30], tp.demo_tokens(length=61)[:, 20:]]
SECTIONS: Any = ["additivity", "distance", "shares", "heads", "perturbation", "ablation"]


def padded(side: str) -> tuple[Tensor, Tensor]:
    width = max(x.shape[1] for x in TEXTS)
    pads = [(width - x.shape[1], 0) if side == "left" else (0, width - x.shape[1]) for x in TEXTS]
    rows = [torch.nn.functional.pad(x, pad, value=0) for x, pad in zip(TEXTS, pads, strict=True)]
    real = [torch.nn.functional.pad(torch.ones_like(x), pad) for x, pad in zip(TEXTS, pads, strict=True)]
    return torch.cat(rows), torch.cat(real)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "side"), PADDED)
def test_padding_is_no_text(backend: str, side: str, tmp_path: Path) -> None:
    """Numbers are means of the texts alone; the loss without a head is over the predicted tokens of all texts."""
    model = tp.load_demo_model(backend=backend)  # type: ignore[arg-type]
    tokens, mask = padded(side)
    path = tmp_path / "padded.html"
    texts = {"input_ids": tokens, "attention_mask": mask}
    tp.report(model, texts, path, control=0, sections=SECTIONS, progress=False)
    document = Document(path)
    alone = pd.concat([tp.additivity(model, x, progress=False) for x in TEXTS]).groupby(["layer", "head"])["r"].mean()
    assert [as_number(row["r"]) for row in document.rows("heads-r")] == pytest.approx(alone.tolist(), abs=6e-4)
    shares = tp.controlled_distance(model, tokens, attention_mask=mask, progress=False)["r_two_axis"].tolist()
    shown = [as_number(row["r two axis"]) for row in document.rows("heads-shares")]
    assert shown == pytest.approx(shares, abs=6e-4)
    drops = [tp.head_ablation(model, x, progress=False)["value"] for x in TEXTS]
    shown = [as_number(row["loss without it"]) for row in document.rows("heads-ablation")]
    assert shown == pytest.approx(((28 * drops[0] + 40 * drops[1]) / 68).tolist(), abs=6e-5)
    n = TEXTS[0].shape[1]
    profile = tp.fit_additive(tp.capture(model, torch.cat([x[:, :n] for x in TEXTS]))[0].scores, pool=True)
    line = document.drawn("the heads of layer 0")[3]
    assert line["y"][8] == pytest.approx(profile.distance[3, 8].item())
    assert "2 texts of 29 to 41 tokens" in document.source
    assert f"Read: 2 texts of {n} tokens, of 2 texts of 29 to 41 tokens." in document.source  # distance profiles


def test_padding_needs_a_mask_and_texts_do_not(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    tokens, mask = padded("right")
    with pytest.raises(ValueError, match="attention_mask"):
        tp.report(model, tokens, tmp_path / "a.html", progress=False)
    with pytest.raises(ValueError, match=r"text cannot be used: .*attention_mask"):
        tp.report(model, {"input_ids": tokens, "attention_mask": mask[:1]}, tmp_path / "a.html", progress=False)
    words = ["We hold these truths to be self-evident", "that all men are created equal, and so on, and so on"]
    tp.report(model, words, tmp_path / "b.html", sections=["additivity"], control=0, progress=False)
    alone = pd.concat([tp.additivity(model, x, progress=False) for x in words]).groupby(["layer", "head"])["r"].mean()
    shown = [as_number(row["r"]) for row in Document(tmp_path / "b.html").rows("heads-r")]
    assert shown == pytest.approx(alone.tolist(), abs=6e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["b.html"]


def test_heads_as_pairs_and_labels(tmp_path: Path) -> None:
    model, path = tp.load_demo_model(), tmp_path / "report.html"
    options: Any = {"heads": ["L4H2", (1, 0), (4, -1)], "control": 0, "progress": False}
    tp.report(model, TEXTS[0], path, sections=["additivity", "heads", "ablation"], **options)
    for table in ("heads-r", "heads-ablation"):
        assert [row["head"] for row in Document(path).rows(table)] == ["L1H0", "L4H2", "L4H7"]
    assert "3, of 8 a layer" in Document(path).source
    assert "heads=['L1H0', 'L4H2', 'L4H7'], sections=[" in Document(path).text


def test_a_report_reads_its_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is each model of ``dynamics``."""
    read: list[Any] = []
    probe = model_reading.probe
    monkeypatch.setattr(model_reading, "probe", lambda model, layers: read.extend(layers) or probe(model, layers))
    path, options = tmp_path / "report.html", {"control": 0, "progress": False}
    tp.report(
        tp.load_demo_model(), TEXTS[0], path, sections=["additivity", "distance", "shares", "ablation"], **options
    )
    assert sorted(read) == [0, 1, 2, 3, 4]
    reading = model_reading.read_model(tp.load_demo_model())
    read.clear()
    tp.report(reading, TEXTS[0], path, sections=["additivity", "heads"], **options)
    assert read == []
    task = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=16, max_length=16, n_ctx=16)
    shape = {"d_vocab": task.d_vocab, "n_ctx": task.n_ctx, "n_out": task.n_out, "pad_id": task.pad_id}
    config = tp.synthetic.SyntheticConfig(n_layers=3, d_model=16, n_heads=2, d_mlp=16, **shape)
    models = {step: SyntheticModel(config) for step in range(3)}
    dynamics(models, task, batches=2, batch_size=4, progress=False)
    assert sorted(read) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
