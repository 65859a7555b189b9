"""Train and evaluate the demo model: a byte-level BPE tokenizer and a small Llama-style language model.

    python examples/train_demo_model.py --data DIR --out OUT

The data are ``speeches-train.txt.gz`` and ``speeches-heldout.txt.gz``: gzipped UTF-8 text, documents separated by a
form feed. One document in twenty of the first file is set aside: the model is not trained on it, and its loss separates
memorisation from the change of language in the held-out file. OUT gets ``tokenizer.json``, ``config.json``,
``weights.safetensors`` (float16), ``step-*.safetensors``, ``curve.csv`` and ``metrics.json``. A run that is stopped
begins again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from tqdm.auto import tqdm
from transformers import AttentionInterface, LlamaForCausalLM

from tl_posdisent.demo import demo_hf_model
from tl_posdisent.demo.demo_model import BOS, load_weights
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.utils.files import whole_file

CONTEXT = 512
TRAIN, HELD_OUT = "speeches-train.txt.gz", "speeches-heldout.txt.gz"


# --- text ---------------------------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[str]:
    """The non-empty documents of a gzipped text file."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    return [document.strip() for document in text.split("\f") if document.strip()]


def train_tokenizer(documents: Sequence[str], *, vocabulary: int = 1024) -> Tokenizer:
    """A byte-level BPE tokenizer: any text round-trips. Token 0 begins every encoding and separates documents."""
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


def text_windows(ids: Sequence[int], *, length: int = CONTEXT) -> list[Tensor]:
    """Cut token ids into windows of at most ``length`` tokens, each after token 0: each id is predicted once."""
    return [torch.tensor([0, *ids[i : i + length - 1]]) for i in range(0, len(ids), length - 1)]


# --- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Settings of the training run; each is an option of the command line."""

    steps: int = 5000
    batch: int = 8  # windows of 512 tokens per step
    peak: float = 2e-3  # highest learning rate
    dropout: float = 0.1
    seed: int = 0
    checkpoint_every: int = 200  # steps between checkpoints and rows of the curve


def learning_rate(options: Options, step: int) -> float:
    """Linear warm-up, then constant, and over the last fifth of the steps linearly to 0."""
    warmup = max(1, min(200, options.steps // 20))
    return options.peak * min(1.0, (step + 1) / warmup, (options.steps - step) / max(1.0, 0.2 * options.steps))


def new_optimizer(model: Any, options: Options) -> torch.optim.AdamW:
    """AdamW; gains do not decay."""
    matrices, gains = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.peak, betas=(0.9, 0.95))


def training_windows(stream: Tensor, options: Options) -> Iterator[Tensor]:
    """The tokens of each step, ``[window, pos]``: windows of the stream at random places, token 0 first."""
    generator = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(stream) - CONTEXT + 2, (options.steps, options.batch, 1), generator=generator)
    for start in starts:
        yield torch.nn.functional.pad(stream[start + torch.arange(CONTEXT - 1)], (1, 0))


def train_step(model: Any, optimizer: torch.optim.AdamW, tokens: Tensor, rate: float) -> dict[str, Tensor]:
    """One step at a learning rate; the loss, and the norm of the gradient before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), "grad_norm": norm.detach()}


def run_steps(
    model: Any, stream: Tensor, options: Options, folder: Path | None, unseen: dict[str, list[Tensor]], progress: bool
) -> None:
    """Train; every ``checkpoint_every`` steps, and at the end, save the weights and the curve of losses."""
    optimizer, rows, recent, start = new_optimizer(model, options), [], [], time.perf_counter()
    save_checkpoint(model, folder, 0, rows)
    windows = tqdm(training_windows(stream, options), "training", options.steps, unit="step", disable=not progress)
    for step, tokens in enumerate(windows, start=1):
        rate = learning_rate(options, step - 1)
        recent.append(train_step(model, optimizer, tokens.to(model.device), rate))
        measured = step % options.checkpoint_every == 0
        if measured or step == options.steps:
            means = {name: torch.stack([x[name] for x in recent]).double().mean().item() for name in recent[0]}
            if not math.isfinite(means["loss"]):
                raise ValueError(f"the loss must be finite, got {means['loss']} before step {step}: try a lower --peak")
            losses = unseen_losses(model, unseen) if measured else {}
            rows.append({"step": step, "lr": rate, **means, **losses, "seconds": time.perf_counter() - start})
            recent = []
            save_checkpoint(model, folder, step, rows)


def unseen_losses(model: Any, unseen: dict[str, list[Tensor]]) -> dict[str, float]:
    with running(model):
        return {name: math.log(perplexity(model, windows)) for name, windows in unseen.items()}


def save_checkpoint(model: Any, folder: Path | None, step: int, rows: list[dict[str, float]]) -> None:
    """Save the weights of a step and the curve so far, if there is a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder / f"step-{step:06d}.safetensors")
        pd.DataFrame(rows).to_csv(folder / "curve.csv", index=False, float_format="%.6g")


def save_weights(model: Any, path: Path) -> None:
    """Write the weights in half precision; the tied unembedding is not stored a second time."""
    state = {k: v.detach().cpu().half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    with whole_file(path) as file:
        file.write(save(state, metadata={"format": "pt"}))


def float32_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of whole windows in float32 among products in bfloat16: CPUs compute it no slower."""
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = query.float(), key.float(), value.float()
        z = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return z.transpose(1, 2).contiguous(), None


def new_model(p: float) -> LlamaForCausalLM:
    """The demo model's architecture with random weights, and dropout of the embeddings and of what every attention and
    MLP adds to the residual stream."""
    AttentionInterface.register("float32_attention", float32_attention)
    model = LlamaForCausalLM(demo_hf_model(trained=False).config)
    model.config._attn_implementation = "float32_attention"
    layers = model.model.layers
    for place in [model.model.embed_tokens, *[x.self_attn.o_proj for x in layers], *[x.mlp for x in layers]]:
        place.register_forward_hook(lambda module, _, output: dropout(output, p, training=module.training))
    return model


def train_model(
    stream: Tensor,
    options: Options,
    folder: Path | None = None,
    *,
    unseen: dict[str, list[Tensor]] | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> LlamaForCausalLM:
    """Train from a seeded initialisation; the global random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        model = new_model(options.dropout).to(device).train()
        run_steps(model, stream, options, folder, unseen or {}, progress)
    return model.eval()


# --- evaluation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(model: Callable[[Tensor], Any], windows: Sequence[Tensor]) -> float:
    """Per token, over windows as ``text_windows`` makes them, of a Hugging Face model."""
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else None
    nats, count = 0.0, 0
    for window in windows:
        tokens = window[None].to(device)
        log_probs = model(tokens).logits[0, :-1].float().log_softmax(-1)
        nats -= float(log_probs.gather(-1, tokens[0, 1:, None]).double().sum())
        count += len(window) - 1
    return math.exp(nats / count)


def order_report(
    model: Callable[[Tensor], Any], encode: Callable[[str], list[int]], documents: Sequence[str], *, seed: int = 0
) -> dict[str, float]:
    """Perplexity of documents as they are, with tokens shuffled within each window, and with words shuffled within each
    document before tokenising. Shuffles keep the tokens or words, so a model that uses their order gets worse."""
    generator = torch.Generator().manual_seed(seed)

    def permuted(n: int) -> list[int]:
        return torch.randperm(n, generator=generator).tolist()

    def windows_of(texts: Sequence[str]) -> list[Tensor]:
        return [window for text in texts for window in text_windows(encode(text))]

    windows = windows_of(documents)
    shuffled = [torch.cat([w[:1], w[1:][permuted(len(w) - 1)]]) for w in windows]
    words = [[text.split()[i] for i in permuted(len(text.split()))] for text in documents]
    plain = perplexity(model, windows)
    by_tokens, by_words = perplexity(model, shuffled), perplexity(model, windows_of([" ".join(w) for w in words]))
    count, n_bytes = sum(len(w) - 1 for w in windows), sum(len(text.encode()) for text in documents)
    return {
        "tokens": count,
        "bytes": n_bytes,
        "perplexity": plain,
        "bits_per_byte": count * math.log2(plain) / n_bytes,
        "perplexity_tokens_shuffled": by_tokens,
        "perplexity_words_shuffled": by_words,
        "ratio_tokens_shuffled": by_tokens / plain,
        "ratio_words_shuffled": by_words / plain,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, save tokenizer, configuration and weights, and measure what was saved: half precision is part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("POSDISENT_DATA", "../shared/data")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(argv))
    data, out, device = given.pop("data"), given.pop("out"), given.pop("device")
    options, documents, held_out = Options(**given), read_documents(data / TRAIN), read_documents(data / HELD_OUT)
    tokenizer = train_tokenizer(documents)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    stream = torch.tensor([i for n, text in enumerate(documents) if n % 20 != 10 for i in [0, *encode(text)]])
    unseen = {
        name: [window for text in texts for window in text_windows(encode(text))]
        for name, texts in (("aside", documents[10::20]), ("heldout", held_out))
    }
    model = train_model(stream, options, out, unseen=unseen, device=device)
    tokenizer.save(str(out / "tokenizer.json"))
    model.config.to_json_file(out / "config.json")
    save_weights(model, out / "weights.safetensors")
    load_weights(model, out / "weights.safetensors")
    metrics = order_report(model, encode, held_out) | {
        "perplexity_aside": perplexity(model, unseen["aside"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": len(stream),
        "tokens_seen": options.steps * options.batch * CONTEXT,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))
    return metrics


if __name__ == "__main__":
    main()
