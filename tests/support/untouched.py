"""Everything that a look at a model, or a refusal, must not change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state(model: Any) -> tuple[Any, ...]:
    """To be compared before and after: hooks in their order, training flags, weights, random numbers, modes.

    The run-time checks of annotations draw random numbers themselves: take the fixture ``unchecked``.
    """
    points = model.hook_dict.items()
    return (
        {name: [id(handle.user_hook) for handle in (*point.fwd_hooks, *point.bwd_hooks)] for name, point in points},
        {name: list(point._forward_hooks) for name, point in points},
        [module.training for module in model.modules()],
        [parameter._version for parameter in model.parameters()],
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002 - the global state is meant
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    )
