"""The story model of the documentation: 260 thousand parameters, trained on TinyStories.

The weights lie outside the project, in the folder that the environment variable `POSDISENT_DATA` names (default:
`../shared/data` beside the project).
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tl_posdisent import bridge_from_hf, hooked_from_hf

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

BOS = 1


def data_file(name: str) -> Path:
    """A file of the data folder."""
    folder = os.environ.get("POSDISENT_DATA") or Path(__file__).parents[4] / "shared" / "data"
    return Path(folder) / name


@dataclass(frozen=True)
class StoriesTokenizer:
    """Byte-pair encoding by scores, as SentencePiece does it; tokens 3 to 258 are the single bytes 0 to 255."""

    pieces: Tokenizer

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [BOS] * bos + self.pieces.encode(" " + text).ids

    def decode(self, tokens: list[int]) -> str:
        text = self.pieces.decode([token for token in tokens if token > 2])
        return text[1:] if tokens[:1] == [BOS] and text.startswith(" ") else text


@functools.cache
def stories_tokenizer() -> StoriesTokenizer:
    """The 512 pieces of `tok512.bin`; of two neighbours those are merged first that make the piece of best score."""
    raw = data_file("tok512.bin").read_bytes()
    pieces, scores, at = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], [], 4
    for token in range(512):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8 + length
        if token > 258:
            pieces.append(raw[at - length : at].decode())
            scores.append((-score, pieces[-1]))
    known = {piece: token for token, piece in enumerate(pieces)}
    halves = ((piece[:i], piece[i:]) for _, piece in sorted(scores) for i in range(1, len(piece)))
    merges = [(a, b) for a, b in halves if a in known and b in known]
    tokenizer = Tokenizer(models.BPE(known, merges, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return StoriesTokenizer(tokenizer)


DIM, HIDDEN, LAYERS, HEADS, KEY_HEADS, VOCAB, CONTEXT = SHAPE = (64, 172, 5, 8, 4, 512, 512)


def stories_hf() -> LlamaForCausalLM:
    """The trained model, a fresh copy, eager attention, float32."""
    raw = data_file("stories260K.bin").read_bytes()
    assert struct.unpack_from("<7i", raw) == SHAPE
    model, d_head, at = _llama(), DIM // HEADS, 0
    numbers = torch.frombuffer(bytearray(raw), dtype=torch.float32, offset=28)

    def take(*shape: int) -> Tensor:
        nonlocal at
        at += math.prod(shape)
        return numbers[at - math.prod(shape) : at].view(shape)

    def half_split(rows: Tensor) -> Tensor:
        """From rotary pairs (0, 1), (2, 3), … to Hugging Face's pairs (c, c + d_head/2)."""
        return rows.view(LAYERS, -1, d_head // 2, 2, DIM).transpose(2, 3).reshape(rows.shape)

    embedding = take(VOCAB, DIM)
    stacked = {  # in the order of the file, every array for all layers in turn
        "input_layernorm": take(LAYERS, DIM),
        "self_attn.q_proj": half_split(take(LAYERS, DIM, DIM)),
        "self_attn.k_proj": half_split(take(LAYERS, KEY_HEADS * d_head, DIM)),
        "self_attn.v_proj": take(LAYERS, KEY_HEADS * d_head, DIM),
        "self_attn.o_proj": take(LAYERS, DIM, DIM),
        "post_attention_layernorm": take(LAYERS, DIM),
        "mlp.gate_proj": take(LAYERS, HIDDEN, DIM),
        "mlp.down_proj": take(LAYERS, DIM, HIDDEN),
        "mlp.up_proj": take(LAYERS, HIDDEN, DIM),
    }
    weights = {f"model.layers.{i}.{name}.weight": x[i] for name, x in stacked.items() for i in range(LAYERS)}
    weights |= {"model.norm.weight": take(DIM), "model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    model.load_state_dict(weights)
    return model


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        **{"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": CONTEXT},
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).float().eval()


def stories_bridge() -> TransformerBridge:
    return bridge_from_hf(stories_hf())


def stories_hooked() -> HookedTransformer:
    return hooked_from_hf(stories_hf())


@functools.cache
def _reference() -> LlamaForCausalLM:
    return stories_hf()


def sample_story(length: int, seed: int, temperature: float = 1.0) -> Int[Tensor, "1 pos"]:
    """A text sampled from the model itself, beginning with BOS; a shorter one of the same seed is its prefix."""
    return _sample_story(length, seed, temperature).clone()


@functools.cache
def _sample_story(length: int, seed: int, temperature: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]

    return _continue(torch.tensor([[BOS]]), length, draw)


@torch.no_grad()
def _continue(tokens: Tensor, length: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    if length > _reference().config.max_position_embeddings:
        raise ValueError(f"length must be at most the context of 512, got {length}")
    cache = DynamicCache()
    new = tokens
    while tokens.shape[1] < length:
        logits = _reference()(new, past_key_values=cache, use_cache=True).logits[:, -1]
        new = choose(logits)[:, None]
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
