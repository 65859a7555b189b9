"""Which device was meant, or a refusal that says what there is."""

from __future__ import annotations

import torch


def check_device(device: str | torch.device | None) -> torch.device | None:
    """The device, or None where the caller has a default of its own.

    Raises:
        ValueError: no device of torch, or one that this machine does not have.

        >>> check_device("gpu")
        Traceback (most recent call last):
        ValueError: device must be one of torch's, such as "cpu" or "cuda:0", got 'gpu'
    """
    if device is None:
        return None
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device must be one of torch\'s, such as "cpu" or "cuda:0", got {device!r}') from error
    if chosen.type == "cuda" and not (chosen.index or 0) < torch.cuda.device_count():
        raise ValueError(f"device must be there, got {device!r}, and torch sees {torch.cuda.device_count()} of cuda")
    return chosen
