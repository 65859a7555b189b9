"""The settings of a small transformer and of its training, and their validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tl_posdisent.synthetic.tasks.task import LARGEST_SEED
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_fields, check_integer, check_number, check_subset, shown

EncodingName = Literal[
    "none",
    "sinusoidal",
    "learned",
    "random",
    "t5",
    "alibi",
    "rope",
    "absolute_rope",
    "sinusoidal_rope",
    "mla",
    "absolute_mla",
]
DropoutPlace = Literal["embed", "pattern", "attn_out", "mlp_out"]

_LATENT = ("mla", "absolute_mla")
_ROTATING = ("rope", "absolute_rope", "sinusoidal_rope")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Settings of a ``SyntheticModel``: its shape, its seed, and how ``train`` trains it.

    The shape has no defaults for sizes, and those of a published transformer for the rest. Training has the defaults of
    arXiv 2505.13027 except clipping and the last batch (``preset("paper")`` has all of its settings): AdamW's learning
    rate rises linearly to ``lr`` over the first ``warmup`` of all steps, and falls to 0 along half a cosine; each epoch
    uses the training samples in a new order.

    Attributes:
        n_layers, d_model, n_heads, d_mlp: depth, width, number of heads, hidden units of each MLP.
        d_vocab, n_ctx: token ids are 0 … d_vocab - 1; texts have at most n_ctx tokens, or more if the encoding allows.
        n_out: number of classes of the read-out (``d_vocab`` for a language model).
        d_head: size of a query, key or value; default ``d_model / n_heads``.
        encoding: ``"none"``, ``"sinusoidal"``, ``"learned"`` (absolute), ``"random"`` (absolute, fixed), ``"t5"``,
            ``"alibi"``, ``"rope"``, ``"absolute_rope"`` (learned absolute and RoPE), ``"sinusoidal_rope"`` (sinusoidal
            and RoPE), ``"mla"`` (latent attention with a decoupled rotary part), ``"absolute_mla"`` (learned absolute
            and MLA).
        rope_base: frequencies are ``rope_base ** (-2c / rotated coordinates)``.
        rotary_heads: number of heads with RoPE in every layer (the first ones); default all.
        sinusoids: order of coordinates of sinusoidal positions: alternating, or all sines, then all cosines.
        alibi_slopes: slopes of heads h = 0, 1, …: the published powers of two, or ``exp(-h / n_heads)``.
        t5_buckets, t5_max_distance: number of biases that distances share; all beyond that distance share one.
        d_query_latent, d_key_latent: latent sizes of MLA; default ``d_model / 2`` and ``d_model / 4``.
        d_rope: number of rotated coordinates of each MLA head; default half of ``d_head``, rounded down to even.
        latent_norm: whether to normalise MLA's latents (RMSNorm).
        shared_rotary_query: whether all heads of an MLA layer share the rotated query part, as they share that of keys.
        causal: whether to hide keys after the query.
        read_out: logits from the mean over all tokens, from the last token, or from every token.
        keys_from: keys and values read the layer's input (as usual), or the embedded text in every layer.
        source_norm: with ``keys_from="input"``: whether keys and values read a LayerNorm of the embedded text.
        final_norm: whether to apply a LayerNorm before the read-out.
        activation: activation function of the MLPs.
        initialisation: ``"scaled"``: matrices N(0, 1 / inputs), smaller where they add to the residual stream, biases
            0; ``"torch"``: PyTorch's default for linear layers, weights and biases U(±1 / √inputs). Vectors of tokens
            are N(0, 1) in both.
        dropout: probability of dropout during training.
        dropout_at: places of dropout: the embedded text, the attention pattern, the outputs of attention or of MLPs.
        pad_id: id of the padding token, which is not a key, is not in the mean, and is never the last token. None:
            padding is read like any other token.
        seed: seed of the initial weights, of the order of samples and of dropout.
        epochs: number of passes over the training samples.
        batch_size: samples per step.
        lr: peak learning rate.
        betas: betas of AdamW, each at least 0 and below 1.
        weight_decay: weight decay of AdamW, 0 or more.
        warmup: share of the steps, from 0 to 1.
        clip: largest norm of the gradient, above 0; None for no clipping.
        keep_last: whether an epoch ends with a smaller batch if ``batch_size`` does not divide ``n_train``; by default
            these samples are left out.
        n_train, n_test: number of training and of test samples; no sample is in both sets.
        split_seed: seed of the samples.
        log_every: number of steps per row of metrics.
        test_every: number of steps between measurements on the test samples; None measures only at the end.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast with weights in float32, which is faster on a GPU.
        pieces: number of pieces into which a batch, sorted by length, is split. Each is as long as its longest text, so
            that less padding is computed; gradients are equal up to rounding. 1 is faster on a GPU.

    Raises:
        ValueError: a value out of range or of the wrong type; an unsupported combination.

    Example:
        >>> from tl_posdisent.synthetic import SyntheticConfig
        >>> config = SyntheticConfig(n_layers=2, d_model=32, n_heads=4, d_mlp=64, d_vocab=50, n_ctx=24, n_out=7)
        >>> config.encoding, config.head_size, config.steps
        ('rope', 8, 13600)
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    n_out: int
    d_head: int | None = None
    encoding: EncodingName = "rope"
    rope_base: float = 10000.0
    rotary_heads: int | None = None
    sinusoids: Literal["alternating", "halves"] = "alternating"
    alibi_slopes: Literal["powers", "exponential"] = "powers"
    t5_buckets: int = 32
    t5_max_distance: int = 128
    d_query_latent: int | None = None
    d_key_latent: int | None = None
    d_rope: int | None = None
    latent_norm: bool = True
    shared_rotary_query: bool = False
    causal: bool = False
    read_out: Literal["mean", "last", "token"] = "mean"
    keys_from: Literal["layer", "input"] = "layer"
    source_norm: bool = True
    final_norm: bool = True
    activation: Literal["gelu", "relu"] = "gelu"
    initialisation: Literal["scaled", "torch"] = "scaled"
    dropout: float = 0.0
    dropout_at: tuple[DropoutPlace, ...] = ("embed", "attn_out", "mlp_out")
    pad_id: int | None = None
    seed: int = 0
    epochs: int = 100
    batch_size: int = 512
    lr: float = 1e-4
    betas: tuple[float, float] = (0.98, 0.9)
    weight_decay: float = 1e-5
    warmup: float = 0.06
    clip: float | None = 1.0
    keep_last: bool = False
    n_train: int = 70_000
    n_test: int = 30_000
    split_seed: int = 0
    log_every: int = 50
    test_every: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    pieces: int = 4

    @property
    def head_size(self) -> int:
        """``d_head``, or its default."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def latent(self) -> bool:
        """Whether attention is MLA."""
        return self.encoding in _LATENT

    @property
    def rotary_dim(self) -> int:
        """Coordinates of a head that are rotated; 0 without rotation."""
        if self.latent:
            return self.d_rope or self.head_size // 4 * 2
        return self.head_size if self.encoding in _ROTATING else 0

    @property
    def query_latent(self) -> int:
        return self.d_query_latent or max(1, self.d_model // 2)

    @property
    def key_latent(self) -> int:
        return self.d_key_latent or max(1, self.d_model // 4)

    @property
    def steps(self) -> int:
        """Number of steps of the whole training run."""
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.n_train // self.batch_size) if self.keep_last else self.n_train // self.batch_size

    def samples(self, steps: int) -> int:
        """Return the number of samples used in the first ``steps`` steps."""
        epochs, within = divmod(steps, self.steps_per_epoch)
        of_epoch = self.n_train if self.keep_last else self.steps_per_epoch * self.batch_size
        return epochs * of_epoch + within * self.batch_size

    def learning_rate(self, step: int) -> float:
        """Compute the learning rate of step 0, 1, … ``steps - 1``."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))

    def __post_init__(self) -> None:
        check_fields(self, least={"rotary_heads": 0, "pad_id": 0, "seed": 0, "split_seed": 0})
        self._check_shape()
        self._check_encoding()
        self._check_training()

    def _check_shape(self) -> None:
        check_number("rope_base", self.rope_base, above=0)
        check_number("dropout", self.dropout, least=0, below=1)
        object.__setattr__(
            self, "dropout_at", tuple(check_subset("dropout_at", self.dropout_at, get_args(DropoutPlace)))
        )
        if self.d_head is None and self.d_model % self.n_heads:
            raise ArgumentError(
                "n_heads", f"must divide d_model = {self.d_model} unless d_head is given, got {self.n_heads}"
            )
        if self.pad_id is not None:
            check_integer("pad_id", self.pad_id, 0, self.d_vocab - 1, why="a token id")

    def _check_encoding(self) -> None:
        encoding = self.encoding
        encodings_of = {
            "rotary_heads": _ROTATING,
            "d_query_latent": _LATENT,
            "d_key_latent": _LATENT,
            "d_rope": _LATENT,
        }
        for name, encodings in encodings_of.items():
            if getattr(self, name) is not None and encoding not in encodings:
                raise ArgumentError(name, f"must be left out with encoding={encoding!r}")
        if self.rotary_heads is not None:
            check_integer("rotary_heads", self.rotary_heads, 0, self.n_heads, why="n_heads")
        if self.latent and (self.rotary_dim % 2 or not 0 < self.rotary_dim < self.head_size):
            raise ArgumentError(
                "d_rope", f"must be even, above 0 and below d_head = {self.head_size}, got {self.rotary_dim}"
            )
        if self.rotary_dim % 2:
            raise ArgumentError("d_head", f"must be even to be rotated in pairs, got {self.rotary_dim}")
        if encoding.startswith("sinusoidal") and self.d_model % 2:
            raise ArgumentError("d_model", f"must be even for sines and cosines, got {self.d_model}")
        if encoding == "t5":
            unit = 2 if self.causal else 4
            if self.t5_buckets % unit:
                raise ValueError(f"t5_buckets must be a multiple of {unit}, got {self.t5_buckets}")
            least = self.t5_buckets // unit + 1
            check_integer("t5_max_distance", self.t5_max_distance, least, why=f"with t5_buckets={self.t5_buckets}")

    def _check_training(self) -> None:
        check_integer("n_train", self.n_train, self.batch_size, why="one batch")
        for name in ("seed", "split_seed"):
            check_integer(name, getattr(self, name), 0, LARGEST_SEED)
        check_number("lr", self.lr, above=0)
        check_number("weight_decay", self.weight_decay, least=0)
        check_number("warmup", self.warmup, least=0, most=1)
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ArgumentError("betas", f"must be a sequence of 2 numbers, got {shown(self.betas)}")
        for beta in self.betas:
            check_number("betas", beta, least=0, below=1)
        object.__setattr__(self, "betas", tuple(self.betas))
