"""The residual stream before a layer as a sum: the embedding, and what each head, bias and MLP of earlier layers added.

Only weighted means over the tokens of a text are formed. What a head adds is linear in its z (at the frozen scale of a
norm after the attention, where there is one), so it is enough to put a head's mean z through its layer's attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.models.partial_forward import forwards
from tl_posdisent.models.reading.attributes import architecture
from tl_posdisent.models.reading.forward import Hook, at_rest, hook_name, run
from tl_posdisent.models.reading.observe import score_tolerance

from .frozen_readout import FrozenNorm, fit_norm
from .qk_readout import keep as keep_at
from .qk_readout import residual_hook

EMBEDDING = "embedding"
_NAME = re.compile(r"L(\d+)(?:H(\d+)| (MLP|bias))")


@dataclass(frozen=True)
class Batch:
    """Texts of equal length and the weights of their tokens.

    Attributes:
        tokens: ids.
        weights: one or several weights of each token.
    """

    tokens: Int[Tensor, "batch pos"]
    weights: Float64[Tensor, "batch pos weight"]


def weighted_sources(
    model: Any, batches: Sequence[Batch], layer: int, tool: str
) -> tuple[list[str], Float64[Tensor, "source weight d_model"]]:
    """Sum over the tokens, weighted, of what every source has added to the stream before a layer.

    Returns:
        Names of the sources: ``"embedding"``, ``"L0H3"``, ``"L0 bias"`` (of the attention's output, if it has one),
        ``"L0 MLP"`` …; and the sums.

    Raises:
        ValueError: a model whose residual stream is not that sum, or whose attention is not linear in z.
    """
    watched = _Watched(model, layer, tool)
    for batch in batches:
        watched.add(batch)
    names, parts = [EMBEDDING], [watched.embedding]
    outputs = _outputs(model, batches[0].tokens, [x.z for x in watched.layers])
    for number, (sums, (heads, bias)) in enumerate(zip(watched.layers, outputs, strict=True)):
        heads, bias = sums.through_norm(heads), sums.through_norm(bias * sums.scale[:, None])
        _check_linear(heads.sum(1) + bias, sums.attention, watched.dtype, _where(model, number, tool))
        names += [f"L{number}H{head}" for head in range(heads.shape[1])]
        parts += heads.unbind(1)
        if bool(bias.any()):
            names.append(f"L{number} bias")
            parts.append(bias)
        names.append(f"L{number} MLP")
        parts.append(sums.mlp)
    return names, torch.stack(parts)


def parse_source(source: str) -> tuple[int, int | None, str | None]:
    """Layer, head, and ``"MLP"`` or ``"bias"``, of a source other than the embedding."""
    match = _NAME.fullmatch(source)
    assert match is not None
    return int(match[1]), None if match[2] is None else int(match[2]), match[3]


def tokens_of_source(model: Any, tokens: Int[Tensor, "batch pos"], source: str) -> Float64[Tensor, "batch pos d_model"]:
    """What one source adds to the stream at every token."""
    if source == EMBEDDING:
        return _run_for(model, tokens, [residual_hook(0)], 1)[residual_hook(0)]
    number, head, part = parse_source(source)
    if part == "MLP":
        name = _hook(number, "hook_mlp_out")
        return _run_for(model, tokens, [name], number + 1)[name]
    added = _hook(number, "hook_attn_out")
    whole = _run_for(model, tokens, [added], number + 1, attention=number)
    none = _run_for(model, tokens, [], number + 1, attention=number, z=torch.zeros_like)
    found = none["attention"]
    if head is not None:
        alone = _run_for(model, tokens, [], number + 1, attention=number, z=partial(_only, head=head))
        found = alone["attention"] - none["attention"]
    out = whole["attention"]
    if torch.equal(out, whole[added]):
        return found
    u, v = out[..., None, :], whole[added][..., None, :]
    norm = fit_norm(u.flatten(0, 1), v.flatten(0, 1), torch.float32)
    assert norm is not None  # ``weighted_sources`` has found it
    return (norm.scales(u, v)[..., None] * norm.linear(found[..., None, :]))[..., 0, :]


def _only(z: Tensor, head: int) -> Tensor:
    alone = torch.zeros_like(z)
    alone[..., head, :] = z[..., head, :]
    return alone


def _run_for(
    model: Any, tokens: Tensor, names: list[str], stop: int, *, attention: int | None = None, z: Any = None
) -> dict[str, Tensor]:
    """What fires at these hooks in one pass, and what a layer's attention returns, with another z if asked for."""
    seen: dict[str, Tensor] = {}
    hooks = [keep_at(name, seen) for name in names]
    modules = {}
    if attention is not None:
        modules = {model.blocks[attention].attn: _recorded(model, attention, seen, "attention")}
    if z is not None:
        hooks.append((_hook(stop - 1, "attn.hook_z"), lambda x, hook: z(x)))
    with forwards(modules):
        run(model, tokens, hooks, stop=stop)
    return {name: x.double() for name, x in seen.items()}


def _recorded(model: Any, number: int, seen: dict[str, Tensor], name: str) -> Any:
    """The forward of a layer's attention, whose output is kept."""
    own = model.blocks[number].attn.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        seen[name] = (out[0] if isinstance(out, tuple) else out).detach()
        return out

    return forward


@dataclass
class _Sums:
    """Weighted sums of one layer over the tokens seen so far."""

    z: Tensor  # [weight, head, d_head]
    attention: Tensor  # [weight, d_model], what attention has added to the stream
    mlp: Tensor  # [weight, d_model]
    scale: Tensor  # [weight], of the scales of the norm after the attention
    norm: FrozenNorm | None  # after the attention

    def __add__(self, other: _Sums) -> _Sums:
        """The sums over both sets of tokens, of one layer."""
        added = (self.z + other.z, self.attention + other.attention, self.mlp + other.mlp, self.scale + other.scale)
        return _Sums(*added, self.norm)

    def through_norm(self, x: Tensor) -> Tensor:
        """The attention's output as it is added to the stream."""
        return x if self.norm is None else self.norm.linear(x[..., None, :])[..., 0, :]


class _Watched:
    """Passes over texts in which the layers before a given one are watched."""

    def __init__(self, model: Any, layer: int, tool: str) -> None:
        self.model, self.layer, self.tool = model, layer, tool
        self.embedding: Tensor = torch.zeros(())
        self.layers: list[_Sums] = []
        self.dtype = torch.float64
        self._seen: dict[str, Tensor] = {}
        self._first = True

    def add(self, batch: Batch) -> None:
        """Run some texts and add up their sums."""
        names = [_hook(number, short) for number in range(self.layer) for short in _ADDED]
        for name in (residual_hook(0), *names):
            if name not in self.model.hook_dict:
                raise ValueError(f"{self.tool} needs the hook {name}, which {architecture(self.model)} does not have")
        start: dict[str, Tensor] = {}
        keep = [keep_at(residual_hook(0), start), *(keep_at(name, self._seen) for name in names)]
        reduce = [(_hook(n, "hook_resid_post"), self._reduce(n, batch.weights)) for n in range(self.layer)]
        watched = {
            self.model.blocks[n].attn: _recorded(self.model, n, self._seen, f"attention {n}") for n in range(self.layer)
        }
        with forwards(watched):
            run(self.model, batch.tokens, [*keep, *reduce], stop=max(self.layer, 1))
        (embedding,) = start.values()
        self.dtype = embedding.dtype
        self.embedding = self.embedding + torch.einsum("bpw,bpm->wm", batch.weights, embedding.double())
        self._first = False

    def _reduce(self, number: int, weights: Tensor) -> Any:
        """A hook after the layer, which turns what it has added into sums."""

        def reduce(after: Tensor, hook: Any) -> None:
            before, added, mlp = (self._seen[_hook(number, x)] for x in _ADDED[:3])
            where = _where(self.model, number, self.tool)
            if not _near(before.double() + added.double() + mlp.double(), after.double(), after.dtype):
                raise ValueError(
                    f"{where} a residual stream to which attention and MLP are added, and here they are not"
                )
            z, out = self._seen[_hook(number, "attn.hook_z")], self._seen[f"attention {number}"].double()
            if z.ndim != 4 or z.shape[:2] != added.shape[:2]:
                raise ValueError(f"{where} heads at hook_z (batch, pos, head, d_head), got {tuple(z.shape)}")
            self._sum(number, weights, z.double(), out, added, mlp)
            for short in _ADDED:
                del self._seen[_hook(number, short)]

        return reduce

    def _sum(self, number: int, weights: Tensor, z: Tensor, out: Tensor, added: Tensor, mlp: Tensor) -> None:
        norm = None if self._first else self.layers[number].norm
        scale = weights
        if not torch.equal(out, added.double()):  # a norm follows the attention
            u, v = out[..., None, :], added.double()[..., None, :]
            norm = norm or fit_norm(u.flatten(0, 1), v.flatten(0, 1), added.dtype)
            if norm is None or not norm.error(u, v) <= score_tolerance(added.dtype) * float(v.abs().amax()):
                raise ValueError(
                    f"{_where(self.model, number, self.tool)} attention whose output is added as it is or after a "
                    "norm, and here it is not"
                )
            scale = weights * norm.scales(u, v)
        sums = _Sums(
            torch.einsum("bpw,bphd->whd", scale, z),
            torch.einsum("bpw,bpm->wm", weights, added.double()),
            torch.einsum("bpw,bpm->wm", weights, mlp.double()),
            scale.sum((0, 1)),
            norm,
        )
        if self._first:
            self.layers.append(sums)
        else:
            self.layers[number] += sums


_ADDED = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "attn.hook_z")


def _outputs(model: Any, tokens: Tensor, means: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What each layer's attention makes of each head's z alone ``[weight, head, d_model]``, and of none ``[d_model]``.

    One pass over as many tokens as there are rows to try; their ids do not matter.
    """
    if not means:
        return []
    rows = [_alone(z) for z in means]
    length = tokens.shape[1]
    texts = max(-(-len(x) // length) for x, _ in rows)
    seen: dict[str, Tensor] = {}
    hooks = [_put(number, x, (texts, length)) for number, (x, _) in enumerate(rows)]
    with at_rest(model), forwards({model.blocks[n].attn: _recorded(model, n, seen, str(n)) for n in range(len(rows))}):
        run(model, tokens[:1].expand(texts, -1), hooks, stop=len(rows))
    found = []
    for number, (x, size) in enumerate(rows):
        out = seen[str(number)].double().flatten(0, 1)[: len(x)]
        heads = (out[:-1] - out[-1]).unflatten(0, size.shape) * size[..., None]
        found.append((heads, out[-1]))
    return found


def _alone(z: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of z in which one head is as in ``z`` but of length 1 and the others are 0, and a row of 0; the lengths."""
    size = z.norm(dim=-1)
    unit = z / torch.where(size > 0, size, 1.0)[..., None]
    n_heads, d_head = z.shape[1:]
    alone = torch.einsum("whd,hg->whgd", unit, torch.eye(n_heads, dtype=z.dtype, device=z.device))
    return torch.cat([alone.flatten(0, 1), alone.new_zeros(1, n_heads, d_head)]), size


def _put(number: int, rows: Tensor, shape: tuple[int, int]) -> Hook:
    def put(z: Tensor, hook: Any) -> Tensor:
        new: Tensor = torch.zeros(shape[0] * shape[1], *rows.shape[1:], dtype=z.dtype, device=z.device)
        new[: len(rows)] = rows.to(z)
        return new.view(*shape, *rows.shape[1:])

    return hook_name(number, "hook_z"), put


def _check_linear(found: Tensor, wanted: Tensor, dtype: torch.dtype, where: str) -> None:
    if not _near(found, wanted, dtype):
        raise ValueError(
            f"{where} attention whose output is a linear function of hook_z, and here it misses the output by "
            f"{(found - wanted).abs().amax().item():.1e} of {wanted.abs().amax().item():.1e} (a gate, "
            "or another layout)"
        )


def _near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return bool((found - wanted).abs().amax() <= score_tolerance(dtype) * wanted.abs().amax())


def _where(model: Any, number: int, tool: str) -> str:
    return f"{tool} needs, in layer {number} of {architecture(model)},"


def _hook(number: int, short: str) -> str:
    return f"blocks.{number}.{short}"
