"""A trained ``SyntheticModel`` as a HookedTransformer, where that class can express it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tl_posdisent.models.loading.convert import check_same_logits, quietly
from tl_posdisent.models.loading.load import has_hooked
from tl_posdisent.models.reading.forward import evaluating

from .transformer import SyntheticModel

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
else:  # what a run-time type checker can know: TransformerLens 4 lacks it
    HookedTransformer = torch.nn.Module

_KINDS = dict.fromkeys(("none", "sinusoidal", "learned", "random"), "standard") | {"rope": "rotary", "alibi": "alibi"}


def to_hooked_transformer(model: SyntheticModel) -> HookedTransformer:
    """Convert a synthetic model to a HookedTransformer with the same weights and logits.

    The model must be causal, with a read-out of every token and a final norm, and with no (a table of zeros),
    sinusoidal, learned, random, rotary or ALiBi positions. HookedTransformer reads padding, so texts must have none.

    Args:
        model: read, not changed; device and dtype are kept.

    Returns:
        A HookedTransformer in evaluation mode, without a tokenizer.

    Raises:
        ValueError: a model that HookedTransformer cannot express, or a TransformerLens without that class.

    Example:
        >>> import torch
        >>> from tl_posdisent.models.loading.load import has_hooked
        >>> from tl_posdisent.synthetic import preset, to_hooked_transformer
        >>> model = preset("small").model("rope", "count", causal=True, read_out="token").eval()
        >>> tokens = torch.arange(1, 21)[None]
        >>> not has_hooked() or bool(torch.allclose(to_hooked_transformer(model)(tokens), model(tokens), atol=1e-5))
        True
    """
    _check_expressible(model)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    c, weights = model.config, model.embed.W_E
    sizes = ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "eps", "act_fn")
    rotary = {"rotary_dim": c.head_size, "rotary_base": c.rope_base, "rotary_adjacent_pairs": False}
    config = HookedTransformerConfig(
        **{name: getattr(model.cfg, name) for name in sizes},
        **(rotary if c.encoding == "rope" else {}),
        d_vocab_out=c.n_out,
        normalization_type="LN",
        positional_embedding_type=_KINDS[c.encoding],
        init_weights=False,
        device=str(weights.device),
        dtype=weights.dtype,
    )
    with quietly():
        hooked = HookedTransformer(config)
    hooked.load_state_dict(_state(model, hooked.state_dict()), strict=True)
    if model.config.encoding == "alibi":
        # HookedTransformer has other slopes unless there are 2, 4, 8 … heads. It reads this table from the last row
        # on, so a text shorter than n_ctx finds a constant for each query in its scores, which no softmax sees.
        bias = model.encoding.bias(model.config.n_ctx)
        assert bias is not None
        for block in hooked.blocks:
            block.attn.alibi = bias.detach().tril()
    hooked.eval()
    real = torch.tensor([t for t in range(min(c.d_vocab, 4096)) if t != c.pad_id])
    picked = torch.randint(len(real), (2, min(c.n_ctx, 64)), generator=torch.Generator().manual_seed(0))
    tokens = real[picked].to(weights.device)
    with evaluating(model), torch.no_grad():
        check_same_logits(hooked(tokens), model(tokens), what="the HookedTransformer made of the synthetic model")
    return hooked


def _check_expressible(model: SyntheticModel) -> None:
    if not isinstance(model, SyntheticModel):
        raise ValueError(f"model must be a SyntheticModel, got {type(model).__name__}")
    c = model.config
    if not has_hooked():
        raise ValueError("the installed TransformerLens has no HookedTransformer, which left it with version 4")
    needed: dict[str, tuple[Any, ...]] = {"encoding": tuple(_KINDS), "causal": (True,), "read_out": ("token",)}
    needed |= {"keys_from": ("layer",), "final_norm": (True,), "rotary_heads": (None, c.n_heads)}
    for name, values in needed.items():
        if getattr(c, name) not in values:
            words = " or ".join(map(repr, values))
            raise ValueError(f"{name} must be {words} for a HookedTransformer, got {getattr(c, name)!r}")


@torch.no_grad()
def _state(model: SyntheticModel, there: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights under HookedTransformer's names, and its own buffers."""
    ours = {name: value for name, value in model.state_dict().items() if not name.startswith("encoding.")}
    if "pos_embed.W_pos" in there:
        positions = model.encoding.embed(model.config.n_ctx)
        ours["pos_embed.W_pos"] = torch.zeros_like(there["pos_embed.W_pos"]) if positions is None else positions
    for name, buffer in there.items():
        last = name.rsplit(".", 1)[-1]
        if last in ("rotary_cos", "rotary_sin"):  # ours are rounded once only
            ours[name] = getattr(model.encoding, last)[: len(buffer)]
        elif last in ("mask", "IGNORE"):
            ours[name] = buffer
    return ours
