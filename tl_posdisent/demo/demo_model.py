"""Load the demo model, its tokenizer and its text from the package's own files, without a network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tl_posdisent.models.loading.checkpoint import set_context
from tl_posdisent.models.loading.load import Backend, TransformerLensModel, as_backend, check_backend, check_device
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import as_path, found_at
from tl_posdisent.utils.validation import check_flag, check_integer, check_seed

BOS = "<|endoftext|>"


def _file(name: str, folder: Path | None = None) -> bytes:
    """Read a file from a folder if it is there, and otherwise from this package."""
    if folder is not None and (folder / name).is_file():
        return (folder / name).read_bytes()
    return (resources.files("tl_posdisent.demo") / name).read_bytes()


def demo_text() -> str:
    """Return an English text of about 3000 tokens, in the style of the demo model's training text.

    >>> demo_text()[:21]
    'My friends and fellow'
    """
    return _file("text.txt").decode("utf-8")


def demo_tokenizer(*, folder: str | Path | None = None) -> PreTrainedTokenizerFast:
    """Load the byte-level BPE tokenizer of the demo model, or that of a training run in ``folder``.

    It has 1024 tokens, and any text round-trips. Encoding puts ``<|endoftext|>`` (token 0) first unless
    ``add_special_tokens=False``; TransformerLens is configured to expect this.

    Raises:
        ValueError: a ``folder`` that is not one.

    >>> demo_tokenizer().decode(demo_tokenizer().encode("the people", add_special_tokens=False))
    'the people'
    """
    if folder is not None:
        folder = as_path("folder", folder, "folder")
        if found_at(folder) != "folder":
            raise ArgumentError(
                "folder", f"must be the folder of a training run, got {brief(folder)}, which is no folder"
            )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_file("tokenizer.json", folder).decode("utf-8")),
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        # TransformerLens would otherwise reload the tokenizer under this name, from a network
        name_or_path="tl_posdisent-demo",
        add_bos_token=True,
        clean_up_tokenization_spaces=False,
    )


def demo_tokens(*, length: int = 256) -> Int[Tensor, "1 pos"]:
    """Return ``<|endoftext|>`` and the first ``length - 1`` tokens of the demo text, shape ``(1, length)``.

    The model was trained on 512 positions; a longer excerpt tests how it extrapolates (a HookedTransformer reads it if
    it was loaded with a larger ``n_ctx``).

    Args:
        length: number of tokens, ``<|endoftext|>`` included.

    Raises:
        ValueError: a ``length`` below 1, or longer than the text.

    >>> demo_tokens(length=3).shape, int(demo_tokens(length=3)[0, 0])
    (torch.Size([1, 3]), 0)
    """
    ids = demo_tokenizer().encode(demo_text())
    check_integer("length", length, 1, len(ids), why="the length of the demo text")
    return torch.tensor([ids[:length]])


def demo_hf_model(*, trained: bool = True, seed: int = 0, checkpoint: str | Path | None = None) -> PreTrainedModel:
    """Load the demo model as a plain Hugging Face model, float32, on the CPU, in evaluation mode.

    Args:
        trained: False gives the same architecture with random weights, a baseline for measurements.
        seed: seed of the random initialisation; the global random state does not change.
        checkpoint: file with weights of ``examples/train_demo_model.py``; ``config.json`` is read from its folder, or
            else the demo model's.

    Raises:
        ValueError: an invalid seed, or a ``checkpoint`` that is not a path.
        OSError, SafetensorError: a checkpoint that is missing or damaged.

    >>> sum(p.numel() for p in demo_hf_model().parameters())
    1038720
    """
    # Imported here because the import takes a quarter of a second, and most users of the package do not need it.
    from transformers import LlamaConfig, LlamaForCausalLM

    path = None if checkpoint is None else as_path("checkpoint", checkpoint)
    config = LlamaConfig.from_dict(json.loads(_file("config.json", path and path.parent)))
    check_flag("trained", trained)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(check_seed(seed))
        model = LlamaForCausalLM(config)
    if path is not None or trained:
        load_weights(model, path)
    return model.eval()


def load_weights(model: PreTrainedModel, path: Path | None = None) -> None:
    """Load a checkpoint of ``examples/train_demo_model.py``, or the demo model's weights, into a model."""
    weights = load(_file("weights.safetensors") if path is None else path.read_bytes())
    state = {name: value.float() for name, value in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied, so stored once
    model.load_state_dict(state)


def load_demo_model(
    *,
    backend: Backend = "auto",
    trained: bool = True,
    seed: int = 0,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    n_ctx: int | None = None,
) -> TransformerLensModel:
    """Load the demo model in TransformerLens, with its tokenizer: 5 layers, 8 query heads on 4 key heads, RoPE.

    Args:
        backend: ``'hooked'`` (HookedTransformer, TransformerLens 3), ``'bridge'`` (TransformerBridge) or ``'auto'``:
            the first of the two that the installed TransformerLens has.
        trained, seed: as in ``demo_hf_model``.
        device: device of the model; default the CPU.
        checkpoint: file with weights of ``examples/train_demo_model.py``; ``config.json`` and ``tokenizer.json`` are
            read from its folder, or else the demo model's.
        n_ctx: the context in tokens, for longer texts than the 512 tokens of the training.

    Returns:
        A model in evaluation mode, float32, with unprocessed weights. It maps token ids ``(batch, pos)`` or a text to
        logits ``(batch, pos, 1024)``; ``to_tokens`` puts ``<|endoftext|>`` first, as in training.

    Raises:
        ValueError: an unknown backend or device, an invalid seed, a ``checkpoint`` that is not a path, or a backend
            that the installed TransformerLens does not have.
        OSError, SafetensorError: a checkpoint that is missing or damaged.

    >>> model = load_demo_model()
    >>> model(model.to_tokens("We the people")).shape[-1]
    1024
    """
    check_backend(backend)
    check_device(device)
    hf_model = demo_hf_model(trained=trained, seed=seed, checkpoint=checkpoint)
    if n_ctx is not None:
        set_context(hf_model.config, check_integer("n_ctx", n_ctx, 1))
    tokenizer = demo_tokenizer(folder=None if checkpoint is None else Path(checkpoint).parent)
    if device is not None:
        hf_model.to(device)
    # Building a TransformerLens model draws random numbers that are then overwritten
    with torch.random.fork_rng(devices=[]):
        return as_backend(hf_model, tokenizer, backend)
