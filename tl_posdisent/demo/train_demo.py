"""Train the demo model: a byte-level BPE tokenizer and a small Llama-style language model.

    python -m tl_posdisent.demo.train_demo --data DIR --out DIR

``DIR`` of the data holds ``speeches-train.txt.gz`` and ``speeches-heldout.txt.gz``: gzipped UTF-8 text,
documents separated by a form feed. The held-out file is read only once training has ended, to measure the
result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from tl_posdisent.utils.files import locked, whole_file

from .evaluate_demo import HELD_OUT, TRAIN, order_report, read_documents

BOS = "<|endoftext|>"
VOCABULARY = 1024
CONTEXT = 512


def train_tokenizer(documents: Sequence[str], *, vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer: any text goes in and comes out unchanged, no token is unknown.

    Token 0 is ``<|endoftext|>``, which begins every encoding made with special tokens and separates
    documents.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def model_config(*, vocabulary: int = VOCABULARY, context: int = CONTEXT) -> LlamaConfig:
    """The architecture: grouped queries, so that query heads and key heads differ, and plain RoPE."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def random_windows(
    stream: Int[Tensor, " stream"], *, batch: int, length: int, bos: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Random stretches of ``length - 1`` tokens, each preceded by ``bos``: what the model meets in use.

    >>> generator = torch.Generator().manual_seed(0)
    >>> w = random_windows(torch.arange(100), batch=2, length=5, bos=7, generator=generator)
    >>> w.shape, w[:, 0].tolist(), bool((w[:, 2:] - w[:, 1:-1] == 1).all())
    (torch.Size([2, 5]), [7, 7], True)
    """
    start = torch.randint(len(stream) - length + 2, (batch, 1), generator=generator)
    windows = stream[start + torch.arange(length - 1)]
    return torch.cat([torch.full((batch, 1), bos, dtype=windows.dtype), windows], dim=1)


def learning_rate(step: int, *, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to ``peak``, then a cosine down to a twentieth of it.

    >>> [round(learning_rate(s, steps=100, peak=1.0, warmup=10), 3) for s in (0, 9, 10, 99)]
    [0.1, 1.0, 1.0, 0.05]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup - 1)
    return peak * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress)))


def save_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write the weights in half precision; the tied unembedding is not stored a second time."""
    state = {k: v.detach().cpu().half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    content = save(state, metadata={"format": "pt"})
    with whole_file(path) as file:
        file.write(content)


def load_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Read what `save_weights` wrote into a model of the same architecture."""
    state = {name: value.float() for name, value in load_file(path).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied, so stored once
    model.load_state_dict(state, strict=True)


def train_model(
    stream: Int[Tensor, " stream"],
    *,
    steps: int,
    batch: int = 8,
    peak: float = 3e-3,
    seed: int = 0,
    init: Path | None = None,
    device: torch.device | None = None,
    progress: bool = True,
    on_step: Callable[[int, LlamaForCausalLM], None] | None = None,
) -> LlamaForCausalLM:
    """Train from a seeded initialisation on seeded windows; the global random state is left as it was.

    ``init`` is a file of weights to go on from, in place of the random ones.
    ``on_step(done, model)`` is called before the first step with 0 and then after every step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model_config())
    if init is not None:
        load_weights(model, init)
    model = model.to(device).train()
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    if on_step is not None:
        on_step(0, model)
    bar = tqdm(range(steps), desc="training", unit="step", mininterval=5.0, file=sys.stderr, disable=not progress)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=steps, peak=peak, warmup=max(1, min(200, steps // 20)))
        tokens = random_windows(stream, batch=batch, length=CONTEXT, bos=0, generator=generator).to(device)
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if on_step is not None:
            on_step(step + 1, model)
    return model.eval()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Command line: train, save tokenizer, config and weights, measure on held-out text, save the metrics."""
    parser = argparse.ArgumentParser(prog="python -m tl_posdisent.demo.train_demo", description=__doc__)
    default_data = os.environ.get("POSDISENT_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default_data), help="folder of the two text files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to (made if absent)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto (a GPU if available), cpu, cuda, ...")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0 = none")
    parser.add_argument("--init", type=Path, help="weights or checkpoint to go on from (give another seed)")
    options = parser.parse_args(argv)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    with locked(options.out, "--out", "training"):
        return _train_and_measure(options, device)


def _train_and_measure(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    documents = read_documents(options.data / TRAIN)
    tokenizer = train_tokenizer(documents)
    tokenizer.save(str(options.out / "tokenizer.json"))
    encoded = tokenizer.encode_batch(documents)  # special tokens on: one separator before each document
    stream = torch.tensor([i for document in encoded for i in document.ids])

    def checkpoint(step: int, model: LlamaForCausalLM) -> None:
        if options.checkpoint_every and step % options.checkpoint_every == 0:
            save_weights(model, options.out / f"step-{step:06d}.safetensors")

    began = time.perf_counter()
    model = train_model(
        stream,
        steps=options.steps,
        batch=options.batch,
        peak=options.peak,
        seed=options.seed,
        init=options.init,
        device=device,
        on_step=checkpoint,
    )
    seconds = time.perf_counter() - began
    model.config.to_json_file(options.out / "config.json")
    save_weights(model, options.out / "weights.safetensors")
    # Measure what was saved, not what was trained: half precision is part of the result.
    load_weights(model, options.out / "weights.safetensors")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    metrics = order_report(model, encode, read_documents(options.data / HELD_OUT), bos=0, device=device)
    metrics |= {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "training_tokens": float(len(stream)),
        "tokens_seen": float(options.steps * options.batch * CONTEXT),
        "seconds": seconds,
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))
    return metrics


if __name__ == "__main__":
    main()
