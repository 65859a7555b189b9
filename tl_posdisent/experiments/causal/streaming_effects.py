"""Loss added by restricting each head to first and near keys: estimated for all heads, exact for the largest."""

from __future__ import annotations

from math import nan
from typing import Any

import pandas as pd

from tl_posdisent.experiments.causal.head_ablation import streaming_ablation, visible_window
from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.hook_list import any_heads, hooks_for
from tl_posdisent.hooks.lambda_mask import hiding
from tl_posdisent.models.reading.model_reading import Layers, ModelReading
from tl_posdisent.models.running.texts import Texts

DRAWS = 4  # of labels, for each text


def streaming_effects(
    reading: ModelReading, texts: Texts, *, sinks: int, window: int | None, layers: Layers, exact: int, seed: int
) -> pd.DataFrame:
    """Estimate the added loss of ``streaming_ablation`` for all heads by ``head_effects``, and run the largest.

    Args:
        sinks, window: as in ``streaming_ablation``.
        exact: number of heads that are run, those with the largest estimates. If it is that of all heads, nothing is
            estimated.
        seed: seed of the labels from which curvatures are estimated.

    Returns:
        One row per head, with ``layer`` and ``head`` as index: ``effect``, and ``exact``, whether it was run.
    """
    window = visible_window(texts, sinks, window)
    chosen = any_heads(reading, layers, None)
    check_reach(reading.model, [spec.layer for spec, _ in chosen])
    places = [(spec.layer, head) for spec, heads in chosen for head in heads]
    found = pd.DataFrame(index=pd.MultiIndex.from_tuples(places, names=["layer", "head"]))
    found["effect"], to_run = nan, places
    if exact < len(places):
        options: dict[str, Any] = {"layers": layers, "draws": DRAWS, "exact": 0, "seed": seed}
        hooks = hooks_for(chosen, hiding("streaming_ablation", sinks, window))
        table = head_effects(reading, texts.tokens, hooks, attention_mask=texts.real, progress=False, **options)
        found["effect"] = table.set_index(found.index)["estimate"]
        to_run = found["effect"].abs().nlargest(exact).index.tolist()
    found["exact"] = found.index.isin(to_run)
    if to_run:
        run = streaming_ablation(
            reading, texts.tokens, attention_mask=texts.real, sinks=sinks, window=window, heads=to_run, progress=False
        )
        found.loc[found["exact"], "effect"] = run.set_index(["layer", "head"])["effect"]
    return found
