"""Load a Hugging Face model, a directory or a name as a TransformerLens model with the original's logits.

A converter that overlooks a head size, a rotary base or a frequency scaling makes a model with wrong outputs, so every
conversion is compared with the original.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tl_posdisent.models.loading.checkpoint import read_checkpoint
from tl_posdisent.models.loading.convert import (
    check_same_logits,
    comparison_tokens,
    hf_logits,
    to_hooked,
)
from tl_posdisent.models.loading.converted import read_packaged
from tl_posdisent.models.loading.names import NEEDED, check_name
from tl_posdisent.models.loading.packaged import PACKAGED
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import found_at
from tl_posdisent.utils.validation import check_choice, check_integer, first_line, shown

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

    TransformerLensModel: TypeAlias = HookedTransformer | TransformerBridge
else:  # for run-time type checkers: importing the classes takes seconds, and 4.x lacks the first
    HookedTransformer = TransformerBridge = TransformerLensModel = torch.nn.Module

# TransformerLens 4 has it in the first module, 3 in the second.
_OFFICIAL_NAME = [
    f"transformer_lens.{m}.get_official_model_name" for m in ("supported_models", "loading_from_pretrained")
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Backend = Literal["auto", "hooked", "bridge"]
"""HookedTransformer, TransformerBridge, or the first of the two that is installed and correct."""


def _lens(*places: str) -> Any:
    """Return the first of these modules and names that the installed TransformerLens has, or None."""
    for place in places:
        with contextlib.suppress(ImportError, AttributeError):  # even hasattr raises ImportError in TransformerLens 4
            return resolve_name(place)
    return None


def has_hooked() -> bool:
    """Say whether the installed TransformerLens has HookedTransformer (3.x does, 4.x does not)."""
    return _lens("transformer_lens.HookedTransformer") is not None


def check_device(device: str | torch.device | None) -> None:
    """Raise ValueError unless torch can use the device; None is the caller's default."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device).item()  # fails on meta, which has no values
    except (RuntimeError, AssertionError, ImportError, NotImplementedError, TypeError) as error:
        raise ArgumentError("device", f"must be one that torch can use, got {device!r}: {first_line(error)}") from error


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is one of TransformerLens's and the installed one has it."""
    check_choice("backend", backend, get_args(Backend))
    if backend == "hooked" and not has_hooked():
        raise ValueError("the installed TransformerLens has no HookedTransformer, use backend='bridge'")


def _own_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """Copy a tokenizer so that TransformerLens may change it and does not reload it from a name that does not exist."""
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ArgumentError("tokenizer", f"must be a tokenizer of transformers or None, got {type(tokenizer).__name__}")
    tokenizer = copy.deepcopy(tokenizer)
    if not tokenizer.init_kwargs.get("name_or_path"):
        # TransformerLens reloads a tokenizer by name unless this flag says that it adds the token by itself. Whether it
        # does is tested by encoding something, so the flag has no other effect.
        tokenizer.init_kwargs |= {"name_or_path": "in-memory", "add_bos_token": True}
    return tokenizer


def _check_hf_model(hf_model: Any) -> None:
    if not isinstance(hf_model, PreTrainedModel):
        merge = ": merge its adapters, hf_model.merge_and_unload()" if hasattr(hf_model, "merge_and_unload") else ""
        raise ArgumentError(
            "hf_model", f"must be a causal language model of transformers, got {type(hf_model).__name__}{merge}"
        )
    if hf_model.get_output_embeddings() is None:
        raise ArgumentError(
            "hf_model",
            f"must return logits, got {type(hf_model).__name__}, which has no language-model head: load it as its "
            "class ...ForCausalLM",
        )


def hooked_from_hf(hf_model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None) -> HookedTransformer:
    """Convert ``hf_model`` to a HookedTransformer with unprocessed weights (nothing folded, nothing centred).

    Args:
        hf_model: a causal language model, which is not changed. Its device and dtype are kept.
        tokenizer: a copy of it is attached to the model, so that ``to_tokens`` works without a network.

    Raises:
        ValueError: not a Hugging Face model, or one with adapters that are not merged; the installed TransformerLens
            has no HookedTransformer, does not know the architecture, or converts it to a model with different outputs
            (``check_same_logits``, rotary tables); the logits of ``hf_model`` itself are not finite.

    >>> from tl_posdisent.demo.demo_model import demo_hf_model
    >>> assert not has_hooked() or hooked_from_hf(demo_hf_model()).cfg.n_key_value_heads == 4
    """
    check_backend("hooked")
    _check_hf_model(hf_model)
    if adapted := [name for name, part in hf_model.named_modules() if hasattr(part, "base_layer")]:
        raise ArgumentError(
            "hf_model",
            f"must have no adapters beside its weights, got one at {adapted[0]}: merge them, merge_and_unload() of the "
            "PEFT model, or use bridge_from_hf",
        )
    tokenizer = _own_tokenizer(tokenizer)
    training = [part for part in hf_model.modules() if part.training]
    try:
        model = to_hooked(hf_model.eval())  # dropout would spoil the comparison of the two
    finally:
        for part in training:
            part.training = True
    config = hf_model.config.get_text_config()
    if stated := getattr(config, "initializer_range", None):
        model.cfg.initializer_range = stated
    if tokenizer is not None:
        model.set_tokenizer(tokenizer)
    return model


def bridge_from_hf(hf_model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None) -> TransformerBridge:
    """Wrap ``hf_model`` in a TransformerBridge, with eager attention so that every hook can fire.

    Args:
        hf_model: a causal language model. The bridge *wraps* it: its submodules are replaced in place by hooked ones
            (its outputs stay the same), and it is put in evaluation mode.
        tokenizer: as in ``hooked_from_hf``.

    Raises:
        ValueError: not a Hugging Face model; TransformerLens does not know the architecture; the bridge's outputs
            differ from those of the model before it was wrapped, or these are not finite.

    >>> from tl_posdisent.demo.demo_model import demo_hf_model
    >>> bridge_from_hf(demo_hf_model())(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 1024])
    """
    _check_hf_model(hf_model)
    return wrapped(hf_model, _own_tokenizer(tokenizer))


def wrapped(hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> TransformerBridge:
    """Wrap ``hf_model`` in a TransformerBridge that keeps this very tokenizer, and compare the two."""
    # A private module, but it has the only function that accepts a model without downloading a tokenizer.
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    hf_model.eval()
    tokens = comparison_tokens(hf_model)
    name = type(hf_model).__name__
    expected = hf_logits(hf_model, tokens)  # before wrapping, with the model's own attention
    try:
        hf_model.set_attn_implementation("eager")
        bridge: TransformerBridge = build_bridge_from_module(
            hf_model, architecture=name, hf_config=hf_model.config, tokenizer=tokenizer
        )
        bridge.eval()
        with torch.no_grad():
            got = bridge(tokens)
    except Exception as error:
        why = first_line(error)
        raise ValueError(f"TransformerLens cannot wrap {name} in a TransformerBridge: {why}") from error
    check_same_logits(got, expected, what=f"the TransformerBridge of {name}")
    return bridge


def as_backend(
    hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, backend: Backend
) -> TransformerLensModel:
    """Convert to the class that ``backend`` names; ``"auto"`` uses the bridge if HookedTransformer's logits differ."""
    if backend == "hooked" or (backend == "auto" and has_hooked()):
        try:
            return hooked_from_hf(hf_model, tokenizer=tokenizer)
        except ValueError as error:
            if isinstance(error, ArgumentError):  # a bridge would fail in the same way
                raise
            if backend == "hooked":
                raise ValueError(f'{str(error).rstrip(".")}; use backend="bridge"') from error
    return bridge_from_hf(hf_model, tokenizer=tokenizer)


def _check_source(name_or_dir: Any) -> None:
    """Refuse what cannot be the folder or the name of a model."""
    if not isinstance(name_or_dir, (str, Path)) or not str(name_or_dir).strip():
        raise ArgumentError("name_or_dir", f"{NEEDED} {shown(name_or_dir)}")
    if str(name_or_dir).endswith(".gguf") and found_at(name_or_dir) != "folder":
        raise ArgumentError(
            "name_or_dir",
            f"{NEEDED} a GGUF file: load it with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name), and pass that model to bridge_from_hf",
        )
    check_name("name_or_dir", name_or_dir)


def _source(name_or_dir: str | Path) -> str | Path:
    """Return an existing folder or a model's name, that of its repository if TransformerLens has a short one."""
    if found_at(name_or_dir) == "folder":
        return Path(name_or_dir)
    with contextlib.suppress(ValueError):  # raised if the name is already a repository
        return str(_lens(*_OFFICIAL_NAME)(name_or_dir))
    return name_or_dir


def _read(
    name_or_dir: str | Path, source: str | Path, dtype: torch.dtype, n_ctx: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Read a folder or a repository; say the name of a repository that is not there or cannot be reached."""
    try:
        return read_checkpoint(source, dtype=dtype, n_ctx=n_ctx)
    except OSError as error:
        if not isinstance(error.__cause__, (RepositoryNotFoundError, LocalEntryNotFoundError, HFValidationError)):
            raise
        raise OSError(
            f"{brief(name_or_dir)} is no folder here, and no model of this name can be read from the Hugging Face hub "
            f"or its cache (packaged models: {', '.join(PACKAGED)}; the demo model: load_demo_model()): "
            f"{first_line(error)}"
        ) from error


def load_model(
    name_or_dir: str | Path,
    *,
    backend: Backend = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    n_ctx: int | None = None,
) -> TransformerLensModel:
    """Load a model from a directory (of `save_pretrained`), a Python package or, by name, the hub or its cache.

    Args:
        name_or_dir: an existing directory, which is read without a network; ``"smollm2"`` or ``"gemma3-270m"``, whose
            weights come in Python packages and are converted to float32 once, in the user's cache (and again if a
            checksum shows that a file of the conversion has changed; for a folder of that name, write ``"./smollm2"``);
            or a model's name: a repository, or TransformerLens's name for it.
        backend: ``'hooked'``, ``'bridge'``, or ``'auto'``: HookedTransformer if the installed TransformerLens has it
            and converts this model correctly, otherwise TransformerBridge.
        device: the model's device; by default the CPU for a directory or package, TransformerLens's choice for a name.
        dtype: dtype of the weights; default float32.
        n_ctx: the context in tokens; default that of the model's configuration. For texts beyond it, which only models
            whose rotation does not depend on the length of the text can read.

    Returns:
        The model with its tokenizer, if it has one. Code shipped with a model is never run, and weights in pickles are
        never read.

    Raises:
        ValueError: unknown backend, device or dtype; a path where no folder is; a GGUF file; a tensor that is
            missing, has another shape than ``config.json`` states, or that the model would ignore; a folder with
            ``model.safetensors`` beside shards, or with an adapter beside either; ``n_ctx`` for a model whose rotation
            depends on its context (dynamic NTK, longrope); a package that is not installed; a model that fails, that
            the backend cannot represent, or whose logits are not finite in this dtype. Whatever transformers cannot
            load is its own error.
        OSError: a name that is neither on the hub nor in its cache, or a hub that cannot be reached.

    >>> import tempfile
    >>> from tl_posdisent.demo.demo_model import demo_hf_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo_hf_model().save_pretrained(folder)
    ...     load_model(folder)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 1024])
    """
    packaged = isinstance(name_or_dir, str) and name_or_dir in PACKAGED  # even if there is a folder of this name
    if not packaged:
        _check_source(name_or_dir)
    check_backend(backend)
    check_device(device)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _DTYPES):
        raise ArgumentError("dtype", f"must be {', '.join(map(str, _DTYPES))} or None, got {shown(dtype)}")
    if n_ctx is not None:
        check_integer("n_ctx", n_ctx, 1)
    if packaged:
        hf_model, tokenizer = read_packaged(str(name_or_dir), dtype=dtype or torch.float32, n_ctx=n_ctx)
    else:
        source = _source(name_or_dir)
        if device is None and isinstance(source, str):
            device = str(_lens("transformer_lens.utilities.devices.get_device")())
        hf_model, tokenizer = _read(name_or_dir, source, dtype or torch.float32, n_ctx)
    if device is not None:
        hf_model.to(device)
    return as_backend(hf_model, tokenizer, backend)
