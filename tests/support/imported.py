"""Imports of the process that ``support.processes.copies`` forks."""

import torch
import transformer_lens  # noqa: F401

import tl_posdisent
from tl_posdisent import experiments, sweeps, synthetic

for module in (tl_posdisent, experiments, sweeps, synthetic):
    for name in module.__all__:
        getattr(module, name)  # imported on demand
torch.set_num_threads(1)
