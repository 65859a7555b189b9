"""A Llama of one layer with weights set by hand: one head at each corner of the where–what plane, and one unused.

A token has four attributes: a topic (one for a text), a kind (one of four, drawn for each token), a label (one for each
kind of a text) and a sign (drawn for each token). Topic, label and sign are +1 or −1. Every token looks for tokens of
the *next* kind, so never for itself.

========  ==========================================  =====================================================
head      attends to                                  reads
========  ==========================================  =====================================================
where     the previous token                          its sign
what      all earlier tokens of the next kind         their label, which other kinds do not share
neither   the nearest earlier token of the next kind  the topic, which any other token would tell as well
both      the nearest earlier token of the next kind  its sign: another distance or another kind tells nothing
not used  the previous token                          nothing
========  ==========================================  =====================================================

Each head sets the logit of one attribute of the next token (the kind is two bits), so the five parts of a prediction
are independent: with v the value that a head reads, that bit is +1 with probability ``sigmoid(2 v)``.
"""

from __future__ import annotations

import torch
import transformers
from jaxtyping import Int
from torch import Tensor

HEADS = ("where", "what", "neither", "both", "not used")
KINDS = 4
VOCAB = 2 * KINDS * 2 * 2

# Scores, in nats. PER_POSITION times 64 stays below NEXT_KIND: kind goes before distance.
NEXT_KIND = 600.0  # of a key of the next kind
PER_POSITION = 8.0  # by which the nearest one is preferred to the one a position farther
PREVIOUS = (20.0, 40.0, 40.0)  # amplitudes at the frequencies 1, 0.1 and 0.01, of waves that peak at distance 1

# Coordinates of the residual stream.
CONSTANT, KIND, TOPIC, LABEL, SIGN, OUTPUT, D_MODEL = 0, 1, 5, 6, 7, 8, 15
READS = {"where": SIGN, "what": LABEL, "neither": TOPIC, "both": SIGN}
LARGE = 1000.0  # the constant coordinate: what heads add to the stream leaves its norm the same within 3e-6

# RoPE turns coordinates c and c + 8 of a head by 10^-c a position. The first three planes see distances; the last four
# turn by no more than 0.006 in 64 positions: they see content.
D_HEAD, PLANES, BASE = 16, 8, 1e8
FREQUENCIES = BASE ** -(torch.arange(PLANES, dtype=torch.float64) / PLANES)
STILL = PLANES - KINDS


def model(with_topic: float = 0.0) -> transformers.LlamaForCausalLM:
    """Build the model; `zoo.as_bridge` and `zoo.as_hooked` wrap and copy it.

    Args:
        with_topic: how much of the topic the heads *where*, *what* and *both* read beside their own attribute, which
            moves them towards *neither*.
    """
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        num_hidden_layers=1,
        num_attention_heads=len(HEADS),
        head_dim=D_HEAD,
        intermediate_size=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    llama = transformers.LlamaForCausalLM(config).float().eval()
    layer = llama.model.layers[0]
    topic, kind, label, sign = attributes(torch.arange(VOCAB))
    with torch.no_grad():
        for weight in llama.parameters():
            weight.zero_()
        embedding = llama.model.embed_tokens.weight
        embedding[:, CONSTANT] = LARGE
        embedding[:, KIND : KIND + KINDS] = torch.eye(KINDS)[kind]
        embedding[:, [TOPIC, LABEL, SIGN]] = torch.stack([topic, label, sign], -1).float()
        size = embedding[0].square().mean().sqrt()  # of all tokens: with this weight a norm changes nothing
        layer.input_layernorm.weight.fill_(size)
        llama.model.norm.weight.fill_(size)
        q, k, v = (
            x.weight.view(len(HEADS), D_HEAD, D_MODEL)
            for x in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        o = layer.self_attn.o_proj.weight.view(D_MODEL, len(HEADS), D_HEAD)
        for h, head in enumerate(HEADS):
            if head in ("where", "not used"):
                for plane, amplitude in enumerate(PREVIOUS):
                    _add_wave(q[h], k[h], plane, amplitude, peak=1.0)
            else:
                _ask_for_next_kind(q[h], k[h])
            if head in ("neither", "both"):  # a sine that falls by PER_POSITION at its zero, halfway through the text
                slope = PER_POSITION / FREQUENCIES[2].item()
                _add_wave(q[h], k[h], 2, slope, peak=32 - torch.pi / 2 / FREQUENCIES[2].item())
            if head in READS:
                v[h, 0, READS[head]] = 1
                v[h, 0, TOPIC] += with_topic * (head in ("where", "what", "both"))
            o[OUTPUT + h, h, 0] = head in READS
        q *= D_HEAD**0.5  # scores are divided by it
        bits = torch.stack([sign, label, topic, 1 - 2 * (kind % 2), 1 - 2 * (kind // 2)], -1)
        llama.lm_head.weight[:, OUTPUT : OUTPUT + len(HEADS)] = bits.float()
    return llama


def with_duplicate_head() -> transformers.LlamaForCausalLM:
    """Build the model with another head in the place of *what*: it attends to the other copy of a token.

    Copies are tokens that agree in all attributes but the sign, which the head reads. What it looks for is what it
    looks from, so content cannot tell an earlier copy from the token itself; that farther keys are preferred does.
    """
    llama, head = model(), HEADS.index("what")
    attention = llama.model.layers[0].self_attn
    with torch.no_grad():
        q, k, v = (
            x.weight.view(len(HEADS), D_HEAD, D_MODEL)[head].zero_()
            for x in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        for kind in range(KINDS):
            q[STILL + kind, KIND + kind] = NEXT_KIND
            k[STILL + kind, KIND + kind] = 1
        for plane, attribute in ((STILL - 1, LABEL), (STILL - 1 + PLANES, TOPIC)):
            q[plane, attribute], k[plane, attribute] = NEXT_KIND / 2, 1
        slope = PER_POSITION / FREQUENCIES[2].item()
        _add_wave(q, k, 2, slope, peak=32 + torch.pi / 2 / FREQUENCIES[2].item())
        q *= D_HEAD**0.5
        v[0, SIGN] = 1
    return llama


def draw_read_twice(n_texts: int, seed: int = 0) -> Int[Tensor, "text pos"]:
    """Draw texts of 32 tokens: one with each topic, kind and label, in some order, then the same in another order."""
    generator = torch.Generator().manual_seed(seed)
    n = VOCAB // 2
    halves = [torch.rand(n_texts, n, generator=generator).argsort(-1) for _ in range(2)]
    return 2 * torch.cat(halves, 1) + torch.randint(2, (n_texts, 2 * n), generator=generator)


def _add_wave(q: Tensor, k: Tensor, plane: int, amplitude: float, peak: float) -> None:
    """Add ``amplitude · cos(θ (distance − peak))`` to the scores of a head, whatever the tokens are."""
    angle = FREQUENCIES[plane] * torch.tensor(peak, dtype=torch.float64)
    q[plane, CONSTANT] = amplitude / LARGE
    k[[plane, plane + PLANES], CONSTANT] = (torch.stack([angle.cos(), angle.sin()]) / LARGE).float()


def _ask_for_next_kind(q: Tensor, k: Tensor) -> None:
    """Add NEXT_KIND to the scores of a head where the key is of the kind after the query's."""
    for kind in range(KINDS):
        q[STILL + (kind + 1) % KINDS, KIND + kind] = NEXT_KIND
        k[STILL + kind, KIND + kind] = 1


def attributes(tokens: Int[Tensor, "*batch"]) -> tuple[Int[Tensor, "*batch"], ...]:
    """Return topic, kind, label and sign of tokens."""
    topic, rest = tokens // (KINDS * 4), tokens % (KINDS * 4)
    return 2 * topic - 1, rest // 4, 2 * (rest // 2 % 2) - 1, 2 * (rest % 2) - 1


def draw_texts(n_texts: int, length: int = 64, seed: int = 0, *, in_turn: bool = False) -> Int[Tensor, "text pos"]:
    """Draw texts; the labels of two kinds are +1 and those of two −1, so a mean over all kinds says nothing.

    With ``in_turn`` the kinds follow each other, so that the tokens of the next kind are 1, 5, 9, … positions earlier:
    where a token is then tells what it is, as in a sequence that is repeated.
    """
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(2, (n_texts, 1), generator=generator)
    kind = torch.randint(KINDS, (n_texts, length), generator=generator)
    if in_turn:
        kind = (-torch.arange(length) % KINDS).expand(n_texts, -1)
    labels = torch.rand(n_texts, KINDS, generator=generator).argsort(-1) % 2
    sign = torch.randint(2, (n_texts, length), generator=generator)
    return ((topic * KINDS + kind) * 2 + labels.gather(1, kind)) * 2 + sign
