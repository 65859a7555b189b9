"""Gradients of the loss with respect to the positional part of each head's scores, per batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import diagonal_sums
from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.running.forward_pass import Recorded, running, with_gradients
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.synthetic.model.encodings import Rope
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import Samples, Task
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.statistics import jackknife
from tl_posdisent.utils.validation import check_choice, check_integer, check_seed, shown

GradientPart = Literal["distance", "encoding"]
Norm = Literal["mean_norm", "norm_of_mean", "expected_norm"]
_COLUMNS = [*(f"{name}_se" for name in get_args(Norm)), *get_args(Norm)]


def positional_gradients(
    model: SyntheticModel,
    task: Task | Samples,
    *,
    part: GradientPart = "distance",
    batches: int = 16,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the gradient with respect to the positional part of each head's scores, per batch and averaged.

    Let ``G[t, i, j]`` be the gradient of the loss (the mean cross-entropy of a batch) with respect to a head's score in
    text t. Each batch gives each head a vector g:

    * ``part="distance"``: ``g[d] = Σ_t Σ_{i-j=d} G[t, i, j]``, the gradient of a profile ``a(i - j)`` added to the
      scores, for any encoding. Its entries sum to 0, as the softmax cancels a constant.
    * ``part="encoding"``: ``g[c] = Σ G ∘ P_c``, the gradient with respect to a factor on what the encoding contributes
      to this head's scores, which is all that changes with the distance. For RoPE and MLA, ``P_c`` is subspace c of the
      scores minus its average over all distances ``1 - pos … pos - 1``; for a bias (ALiBi, T5) it is the bias, and g
      has one entry.

    If the gradients of batches cancel each other, the norm of their mean is about ``1/√batches`` of the mean of their
    norms (arXiv 2505.13027, propositions 6.1 and 6.2: RoPE has a lower bound, ALiBi cancels). Dropout is off.

    Args:
        model: a model with one answer per text (``read_out`` "mean" or "last"), trained or not.
        task: the task from which batches are drawn; or tokens ``[sample, pos]`` and labels ``[sample]``, which are cut
            into batches.
        part: ``"distance"`` or ``"encoding"``; the second needs an encoding that acts on queries and keys or on scores.
        batches, batch_size: number of batches, at least 2, and texts in each.
        seed: seed of the batches that are drawn.

    Returns:
        One row per layer and head: ``mean_norm``, the mean over batches of ``‖g‖``; ``norm_of_mean``, ``‖mean g‖``;
        ``expected_norm``, an estimate of ``‖E g‖`` without the noise of the batches,
        ``√max(0, ‖mean g‖² - tr cov(g) / batches)``; ``mean_norm_se``, ``norm_of_mean_se`` and ``expected_norm_se``,
        their jackknife standard errors over batches.

    Raises:
        ValueError: a model with an answer per token; ``part="encoding"`` with an encoding that does not act on scores;
            more batches or texts than there are samples; a loss that is not finite.

    Example:
        >>> from tl_posdisent.synthetic import positional_gradients, preset
        >>> small = preset("small")
        >>> model = small.model("rope", "distance")
        >>> table = positional_gradients(model, small.tasks["distance"], batches=2, batch_size=8, progress=False)
        >>> table.columns.tolist()[-3:], len(table)
        (['mean_norm', 'norm_of_mean', 'expected_norm'], 12)
    """
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    check_choice("part", part, get_args(GradientPart))
    if model.config.read_out == "token":
        raise ArgumentError("model", 'must have one answer per text (read_out "mean" or "last"), got "token"')
    if part == "encoding" and not model.encoding.rotates and model.encoding.bias(2) is None:
        raise ArgumentError(
            "part", f'must be "distance" with encoding={model.config.encoding!r}, which does not act on scores'
        )
    check_integer("batches", batches, 2)
    check_integer("batch_size", batch_size, 1)
    drawn, device = _batches(task, batches, batch_size, check_seed(seed)), model.embed.W_E.device
    bar = tqdm(drawn, total=batches, desc="batches", disable=not progress)
    g = torch.stack([_vectors(model, tokens.to(device), labels.to(device), part) for tokens, labels in bar])
    columns = _norms(g)
    others = [_norms(torch.cat([g[:b], g[b + 1 :]])) for b in range(len(g))]
    for name in get_args(Norm):
        values = torch.stack([columns[name], *(other[name] for other in others)])
        columns[f"{name}_se"] = jackknife(values, torch.ones(batches)).error
    layer, head = np.indices(g.shape[1:3]).reshape(2, -1).tolist()
    norms = {name: columns[name].flatten().tolist() for name in _COLUMNS}
    return pd.DataFrame({"layer": layer, "head": head, **norms})


def _norms(g: Float64[Tensor, "batch layer head n"]) -> dict[str, Float64[Tensor, "layer head"]]:
    """Compute the three norms of every head; for a single batch the third equals the second."""
    mean = g.mean(0)
    noise = g.var(0).sum(-1) / len(g) if len(g) > 1 else torch.zeros_like(mean[..., 0])
    expected = (mean.square().sum(-1) - noise).clamp_min(0).sqrt()
    return {"mean_norm": g.norm(dim=-1).mean(0), "norm_of_mean": mean.norm(dim=-1), "expected_norm": expected}


def _vectors(
    model: SyntheticModel, tokens: Tensor, labels: Tensor, part: GradientPart
) -> Float64[Tensor, "layer head n"]:
    """Compute the vector g of every head for one batch."""
    seen = Recorded()
    length, layers = tokens.shape[1], range(model.cfg.n_layers)
    with torch.inference_mode(False):  # tensors made in inference mode cannot take part in a gradient
        tokens, labels = tokens.clone(), labels.clone()
        shape = (len(layers), len(tokens), model.cfg.n_heads, length, length)
        nothing = torch.zeros(shape, device=tokens.device, requires_grad=True)
    names = [hook_name(layer, f"hook_{side}") for layer in layers for side in "qk"] if part == "encoding" else []
    hooks = [(hook_name(n, "hook_attn_scores"), lambda x, hook, n=n: x + nothing[n].to(x.dtype)) for n in layers]
    with with_gradients(model), running(model), applied(model, [*hooks, *seen.hooks(names)]):
        loss = cross_entropy(model(tokens).float(), labels)
        (gradient,) = torch.autograd.grad(loss, nothing)
    if not bool(loss.isfinite()) or not bool(gradient.isfinite().all()):
        raise ArgumentError("model", f"must have a finite loss and gradient on the task, got a loss of {loss.item()}")
    if part == "distance":
        return diagonal_sums(gradient.sum(1, dtype=torch.float64), 1 - length, length - 1)
    if not model.encoding.rotates:
        bias = model.encoding.bias(length)
        assert bias is not None
        along: Tensor = (gradient.sum(1, dtype=torch.float64) * bias.detach()).sum((-2, -1))[..., None]
        return along  # the bias need not be centred: a softmax ignores a constant
    sides = [torch.stack([seen[hook_name(layer, f"hook_{side}")] for layer in layers]) for side in "qk"]
    return torch.stack([_along_rotation(model, *x) for x in zip(gradient, *sides, strict=True)])


def _along_rotation(model: SyntheticModel, gradient: Tensor, q: Tensor, k: Tensor) -> Float64[Tensor, "head subspace"]:
    """Compute ``Σ G ∘ P_c`` for one layer without forming the products of queries and keys."""
    encoding, length = model.encoding, q.shape[1]
    assert isinstance(encoding, Rope)
    heads, n = encoding.heads, encoding.dim // 2

    def along(q: Tensor, k: Tensor) -> Float64[Tensor, "head subspace"]:
        products: Tensor = torch.einsum("bqhd,bhqk,bkhd->hd", q.double(), gradient.double(), k.double())[:, : 2 * n]
        return products[:, :n] + products[:, n:]  # coordinates c and c + n make a subspace

    cos = encoding.tables(length)[0][:, :n].double()
    average = (2 * cos.sum(0) - cos[0]) / (2 * length - 1)  # over -d and d: the sines cancel
    g = model.config.head_size**-0.5 * (along(encoding.rotate(q), encoding.rotate(k)) - average * along(q, k))
    return g if heads is None else torch.where(torch.arange(len(g), device=g.device)[:, None] < heads, g, 0.0)


def gradient_margins(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the margin of the largest positional gradient in each layer.

    By theorem 6.1 of arXiv 2505.13027 margins grow towards the first layer: ``margin_l ≥ margin_L · Π_k γ_k``, with k
    from layer l to the last but one and every ``γ_k > 1``.

    Args:
        table: a table from ``positional_gradients``, or from ``dynamics``, which is evaluated for each of its steps.

    Returns:
        One row per layer: ``step`` if the table has it, ``layer``, ``head`` (the one with the largest gradient), its
        ``norm_of_mean`` as ``largest``, that of the next head as ``second``, ``margin`` (their difference), and
        ``margin_se`` if the table has standard errors (assuming that those of two heads are independent).

    Raises:
        ValueError: a table without these columns; a layer with a single head.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.synthetic import gradient_margins
        >>> norms = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "norm_of_mean": [1.0, 4.0, 2.5, 1.0]}
        >>> gradient_margins(pd.DataFrame(norms))
           layer  head  largest  second  margin
        0      0     1      4.0     1.0     3.0
        1      1     0      2.5     1.0     1.5
    """
    by, error = "norm_of_mean", "norm_of_mean_se"
    missing = [name for name in ("layer", "head", by) if name not in getattr(table, "columns", ())]
    if missing:
        raise ArgumentError(
            "table", f"must have the column {missing[0]!r}, as from positional_gradients, got {shown(table)}"
        )
    keys = [name for name in ("step", "layer") if name in table.columns]
    layers: Any = table.sort_values(by, ascending=False, kind="stable").groupby(keys)
    if layers.size().min() < 2:
        raise ArgumentError("table", f"must have at least two heads in every layer, got {layers.size().min()}")
    first, second = (layers.nth(n).sort_values(keys, ignore_index=True) for n in (0, 1))
    margins: pd.DataFrame = first[[*keys, "head"]].assign(
        largest=first[by], second=second[by], margin=first[by] - second[by]
    )
    if error in table.columns:
        margins["margin_se"] = np.hypot(first[error], second[error])
    return margins


def _batches(task: Task | Samples, batches: int, batch_size: int, seed: int) -> Iterator[Samples]:
    if isinstance(task, Task):
        generator = torch.Generator().manual_seed(seed)
        return (task.batch(batch_size, generator) for _ in range(batches))
    if not isinstance(task, tuple) or len(task) != 2 or not all(isinstance(x, Tensor) for x in task):
        raise ArgumentError("task", f"must be a Task, or a pair of tokens and labels, got {type(task).__name__}")
    texts, labels = (len(x) for x in task)
    if texts != labels or texts < batches * batch_size:
        raise ArgumentError(
            "task",
            f"must have labels for at least batches · batch_size = {batches * batch_size} texts, got {texts} "
            f"texts and {labels} labels",
        )
    return itertools.islice(zip(*(x.split(batch_size) for x in task), strict=True), batches)
