"""The state that a tool, or an error, must leave as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tl_posdisent.models.running.model_parts import modules


def state(model: Any) -> tuple[Any, ...]:
    """To be compared before and after: hooks in their order, training flags, weights, random numbers, modes.

    The run-time checks of annotations draw random numbers themselves: take the fixture ``unchecked``.
    """
    return (
        *state_of_model(model),
        torch.random.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # noqa: NPY002 - the global state is meant
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    )


def state_of_model(model: Any) -> tuple[Any, ...]:
    """Hooks of both kinds, training flags, and a number per parameter that grows with every change in place."""
    parts: list[Any] = modules(model)  # without the names that torch and TransformerLens would make for them
    points = [part for part in parts if "fwd_hooks" in vars(part)]
    return (
        [[id(handle.user_hook) for handle in (*point.fwd_hooks, *point.bwd_hooks)] for point in points],
        [list(point._forward_hooks) for point in points],
        [part.training for part in parts],
        [x._version for part in parts for x in part._parameters.values() if x is not None],
    )
