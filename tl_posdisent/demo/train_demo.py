"""Train the demo model: a byte-level BPE tokenizer and a small Llama-style language model.

    python -m tl_posdisent.demo.train_demo --data DIR --out DIR

``DIR`` of the data holds ``speeches-train.txt.gz`` and ``speeches-heldout.txt.gz``: gzipped UTF-8 text,
documents separated by a form feed. One document in twenty of the first file is set aside: the model is not trained on
it, and its loss separates memorisation from the change of language in the held-out file, from which nothing is chosen.
A training that was stopped goes on from its last checkpoint if the command is given again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from tl_posdisent.utils.files import locked, whole_file

from .evaluate_demo import HELD_OUT, TRAIN, order_report, perplexity, read_documents, text_windows, total_nats

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


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, decay: float = 0.2) -> float:
    """Linear warm-up to ``peak``, which is kept until the last ``decay`` of the steps, then linearly down to zero.

    Until the rate falls, nothing depends on the number of steps: a training can be prolonged from there.

    >>> [round(learning_rate(s, steps=100, peak=1.0, warmup=10), 3) for s in (0, 9, 79, 89, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.05]
    """
    return peak * min(1.0, (step + 1) / warmup, (steps - step) / max(1.0, decay * steps))


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


def float32_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of whole windows in float32 among products in bfloat16: CPUs compute it no slower."""
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = query.float(), key.float(), value.float()
        z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return z.transpose(1, 2).contiguous(), None


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Dropout, in training, of the embeddings and of what every attention and MLP adds to the residual stream."""
    layers = model.model.layers
    places = [model.model.embed_tokens, *[x.self_attn.o_proj for x in layers], *[x.mlp for x in layers]]
    for place in places:
        place.register_forward_hook(
            lambda module, _, output: torch.nn.functional.dropout(output, p, training=module.training)
        )


def train_model(
    stream: Int[Tensor, " stream"],
    *,
    steps: int,
    batch: int = 8,
    peak: float = 2e-3,
    dropout: float = 0.1,
    seed: int = 0,
    state: Path | None = None,
    state_every: int = 200,
    device: torch.device | None = None,
    progress: bool = True,
    on_step: Callable[[int, LlamaForCausalLM, float], None] | None = None,
) -> LlamaForCausalLM:
    """Train from a seeded initialisation on seeded windows; the global random state is left as it was.

    ``state`` is a file that is written every ``state_every`` steps; if it is there, training goes on from it as if it
    had never stopped. ``on_step(done, model, loss)`` is called before the first step with 0 and NaN, and then after
    every step with the loss of that step's windows.

    Raises:
        ValueError: ``state`` is of a training with other text or settings. Another number of steps is none, as long as
            the learning rates of the steps done are the same.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model_config()).to(device).train()
        AttentionInterface.register("float32_attention", float32_attention)
        model.config._attn_implementation = "float32_attention"
        add_dropout(model, dropout)
        rates = [learning_rate(n, steps=steps, peak=peak, warmup=max(1, min(200, steps // 20))) for n in range(steps)]
        settings = {"seed": seed, "batch": batch, "dropout": dropout, "text": _digest(stream)}
        training = _Training(model, _optimizer(model, peak), torch.Generator().manual_seed(seed), settings, rates)
        if state is not None and state.exists():
            training.load(state)
        elif on_step is not None:
            on_step(0, model, math.nan)
        todo = range(training.done, steps)
        for step in tqdm(todo, "training", unit="step", mininterval=5.0, file=sys.stderr, disable=not progress):
            loss = training.step(random_windows(stream, batch=batch, length=CONTEXT, bos=0, generator=training.draw))
            if on_step is not None:
                on_step(step + 1, model, loss)
            if state is not None and (step + 1) % state_every == 0:
                training.save(state)
        return model.eval()


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:12]


def _optimizer(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    """Weight decay of matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))


@dataclass
class _Training:
    """What a training needs to go on."""

    model: LlamaForCausalLM
    optimizer: torch.optim.AdamW
    draw: torch.Generator
    """Of the windows; dropout draws from the global random state."""
    settings: dict[str, Any]
    rates: list[float]
    """Of all steps."""
    done: int = 0

    def step(self, tokens: Int[Tensor, "batch pos"]) -> float:
        """The loss, in nats per token, before the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[self.done]
        tokens = tokens.to(self.model.device)
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits = self.model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def save(self, path: Path) -> None:
        moments = {f"{n}/{i}": x for i, state in self.optimizer.state_dict()["state"].items() for n, x in state.items()}
        # Of the tied matrices, which are one parameter, there is one name.
        weights = {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}
        draws = {"windows": self.draw.get_state(), "dropout": torch.get_rng_state(), "done": torch.tensor(self.done)}
        so_far = {"settings": json.dumps(self.settings | {"learning rates": self._rates(self.done)})}
        content = save({name: x.cpu().contiguous() for name, x in (moments | weights | draws).items()}, so_far)
        with whole_file(path) as file:
            file.write(content)

    def load(self, path: Path) -> None:
        kept = load_file(path)
        done = int(kept["done"])
        with safe_open(path, "pt") as file:
            there = json.loads((file.metadata() or {}).get("settings", "{}"))
        here = self.settings | {"learning rates": self._rates(done)}
        other = [name for name in here if there.get(name) != here[name]]
        if other:
            raise ValueError(
                f"out must hold this training to go on with it, but {path} is of {done} steps with "
                + ", ".join(f"{name} {there.get(name)} (not {here[name]})" for name in other)
                + ": give what it was begun with, or another folder"
            )
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(kept[f"model/{name}"])
        names = ("step", "exp_avg", "exp_avg_sq")
        number = sum(len(group["params"]) for group in self.optimizer.param_groups)
        moments = {i: {name: kept[f"{name}/{i}"] for name in names} for i in range(number)}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.draw.set_state(kept["windows"])
        torch.set_rng_state(kept["dropout"])
        self.done = done

    def _rates(self, done: int) -> str:
        """What tells the learning rates of the first steps from others."""
        rates = torch.tensor(self.rates[:done], dtype=torch.float64)
        return f"{len(rates)} up to {rates.max():.3g}, {_digest(rates)}"


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Command line: train, save tokenizer, config and weights, measure on held-out text, save the metrics."""
    parser = argparse.ArgumentParser(prog="python -m tl_posdisent.demo.train_demo", description=__doc__)
    default_data = os.environ.get("POSDISENT_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default_data), help="folder of the two text files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to (made if absent)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto (a GPU if available), cpu, cuda, ...")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--checkpoint-every", type=int, default=200, help="steps between checkpoints and rows of the curve"
    )
    options = parser.parse_args(argv)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    with locked(options.out, "--out", "training"):
        return _train_and_measure(options, device)


def _train_and_measure(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    documents, out = read_documents(options.data / TRAIN), options.out
    tokenizer = train_tokenizer(documents)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    # One separator before each document.
    stream = torch.tensor([i for n, text in enumerate(documents) if n % 20 != 10 for i in [0, *encode(text)]])
    unseen = {"aside": documents[10::20], "heldout": read_documents(options.data / HELD_OUT)}
    windows = {
        name: [w for text in texts for w in text_windows(encode(text), length=CONTEXT, bos=0)]
        for name, texts in unseen.items()
    }
    began = time.perf_counter()
    model = train_model(
        stream,
        steps=options.steps,
        batch=options.batch,
        peak=options.peak,
        dropout=options.dropout,
        seed=options.seed,
        state=out / "state.safetensors",
        state_every=options.checkpoint_every,
        device=device,
        on_step=_checkpoints(out, options.checkpoint_every, windows),
    )
    seconds = time.perf_counter() - began
    tokenizer.save(str(out / "tokenizer.json"))
    model_config().to_json_file(out / "config.json")
    save_weights(model, out / "weights.safetensors")
    # Measure what was saved, not what was trained: half precision is part of the result.
    load_weights(model, out / "weights.safetensors")
    metrics = order_report(model, encode, unseen["heldout"], bos=0, device=device)
    metrics |= {
        "perplexity_aside": perplexity(model, windows["aside"], device=device),
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "training_tokens": float(len(stream)),
        "tokens_seen": float(options.steps * options.batch * CONTEXT),
        "seconds": seconds,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))
    return metrics


def _checkpoints(
    out: Path, every: int, windows: dict[str, list[Tensor]]
) -> Callable[[int, LlamaForCausalLM, float], None]:
    """Weights and a row of ``curve.csv`` every so many steps: the loss in nats per token, in training since the row
    before (with dropout) and on the texts that the model does not see."""
    recent: list[float] = []

    def checkpoint(step: int, model: LlamaForCausalLM, loss: float) -> None:
        recent.append(loss)
        if step % every:
            return
        save_weights(model, out / f"step-{step:06d}.safetensors")
        model.eval()
        losses = [
            nats / count for nats, count in (total_nats(model, each, device=model.device) for each in windows.values())
        ]
        model.train()
        # A training that was killed after this row and before its state was written comes here again.
        table = pd.read_csv(out / "curve.csv") if step else pd.DataFrame()
        row = {"step": step, "training": statistics.mean(recent), **dict(zip(windows, losses, strict=True))}
        table = pd.concat([table[table["step"] < step] if step else table, pd.DataFrame([row])])
        table.to_csv(out / "curve.csv", index=False, float_format="%.4f")
        recent.clear()

    return checkpoint


if __name__ == "__main__":
    main()
