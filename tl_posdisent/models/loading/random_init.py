"""Random-weights baselines: copies of a model with random or shuffled weights."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from transformer_lens.hook_points import HookPoint

from tl_posdisent.models.loading.load import wrapped
from tl_posdisent.models.reading.rotations import rotary_module
from tl_posdisent.models.running.model_parts import device_of, dtype_of, modules, n_layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_number, check_seeds, shown

Baseline: TypeAlias = Literal["random", "shuffled"]
"""Whether the weights of a copy are drawn anew, or are the model's in a random order."""

Scale: TypeAlias = float | Literal["config"]
"""The standard deviation of random weights, or ``"config"`` for the one that the model's configuration states."""

USUAL_STD = 0.02  # the default of transformers' configurations
_SCALES = ("initializer_range", "init_std")  # its name in configurations; OPT uses the second
_SINKS = "sinks"  # the logits of attention sinks, one for each head
_OF_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks", "ctx")


def random_control(
    model: Any,
    seeds: int | Iterable[int] = 1,
    *,
    weights: Baseline = "random",
    std: Scale = "config",
) -> Iterator[Any]:
    """Yield random-weights baselines: copies of a model with other weights, one in memory at a time.

    Compare every number of a trained model with this baseline. ``weights`` says what is random, and thus which question
    the comparison answers:

    * ``"random"`` (default): all weights are redrawn, as before training. What did training change? A TransformerBridge
      is initialised like its Hugging Face class; in a HookedTransformer, weights are drawn from N(0, std²), gains of
      norms are 1 and biases 0. Rotation tables, the scale of scores and the logits of attention sinks stay the model's.
    * ``"shuffled"``: the entries of each weight matrix and vector are permuted. Is the scale of the trained weights
      enough, without their structure?

    How additive the scores of random weights are depends on ``std``: in SmolLM2-135M the mean *r* of one text is .88 at
    0.02 and .52 at its own 1/24.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, which is not changed.
        seeds: number of copies (seeds 0, 1 …), or a list of seeds; the global random state is restored.
        weights: ``"random"`` or ``"shuffled"``.
        std: standard deviation of the weights that are drawn: a number, or ``"config"`` for ``initializer_range`` of
            the model's configuration. GGUF files do not state it: ``load_model`` fills in the published one of its
            packaged models, and in a model that transformers read from such a file it is transformers' default.

    Yields:
        A model of the same class, device and dtype, in evaluation mode, without the hooks of ``model``; one per seed.
        ``copy.cfg.initializer_range`` is the standard deviation.

    Raises:
        ValueError: seeds that are not integers, repeated or missing; unknown ``weights``; a std that is not above 0, or
            given for ``"shuffled"``, which uses none; not a TransformerLens model; quantised or parametrized weights,
            except for a TransformerBridge with ``"random"``, whose copies are made from the configuration.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, random_control
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> copies = [model, *random_control(model, seeds=[0, 1])]
        >>> r = [additivity(m, tokens, layers=[0], progress=False)["r"].mean() for m in copies]
        >>> bool(r[0] > max(r[1:])), [m.cfg.initializer_range for m in copies]
        (True, [0.02, 0.02, 0.02])
    """
    n_layers(model)  # or raise: not a TransformerLens model
    check_choice("weights", weights, get_args(Baseline))
    numbers = check_seeds(seeds)
    if weights == "shuffled":
        if std != "config":
            raise ArgumentError(
                "std", f'must be "config" for weights="shuffled", which keeps the weights, got {shown(std)}'
            )
        _check_parameters(model, weights)
        return (_shuffled(model, seed) for seed in numbers)
    scale = initial_scale(model, std)
    if _drawn_in_place(model):
        _check_parameters(model, weights)
    return (_initialised(model, scale, seed) for seed in numbers)


def _check_parameters(model: Any, weights: Baseline) -> None:
    """Refuse weights that are no floating point parameters, which a copy would keep: quantised or parametrized ones."""
    for part in modules(model):
        own = [*part.parameters(recurse=False)]
        integers = not all(x.is_floating_point() for x in own)
        no_matrix = hasattr(part, "in_features") and not any(x.ndim > 1 for x in part.parameters())
        if is_parametrized(part) or integers or no_matrix:
            kind = type(getattr(part, "original_component", None) or part).__name__
            raise ArgumentError(
                "model",
                f"must keep its weights in floating point parameters for weights={weights!r}, which replaces these "
                f"alone, and a module ({kind}) has others, which would stay the trained ones: load the model without "
                "quantisation, or convert these weights to parameters",
            )


def initial_scale(model: Any, std: Scale) -> float:
    """Return the standard deviation of random weights; warn if the model's configuration states none."""
    return _stated(model) if isinstance(std, str) and std == "config" else check_number("std", std, above=0)


def described_copies(std: float, seeds: Sequence[int]) -> str:
    """Describe in words the copies with which a table was compared.

    >>> described_copies(0.02, [0, 1])
    'random weights, standard deviation 0.02, seeds 0, 1'
    """
    which = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    return f"random weights, standard deviation {std:.3g}, {which}"


def _configuration(model: Any) -> Any:
    """Return the Hugging Face configuration by which a bridge's weights are drawn, or else TransformerLens's."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return model.cfg if config is None else config.get_text_config()


def _stated(model: Any) -> float:
    config = _configuration(model)
    stated = next((x for name in _SCALES if (x := getattr(config, name, None))), None)
    if stated is not None and not _is_default(model, config, float(stated)):
        return float(stated)
    warnings.warn(
        f"std: the model's configuration does not state the standard deviation of its initial weights, so {USUAL_STD} "
        "is taken; how additive random weights are depends on it: pass std=, or several",
        stacklevel=4,
    )
    return USUAL_STD


def _is_default(model: Any, config: Any, stated: float) -> bool:
    """Say whether the number is not specific to this model: a library's default, or the gain of another scheme."""
    if getattr(config, "init_mode", "gpt2") != "gpt2":
        return True
    pretrained = getattr(config, "original_architecture", None) is not None and config is model.cfg
    return pretrained and math.isclose(stated, 0.8 / config.d_model**0.5)  # TransformerLens's


def _copied(model: Any) -> Any:
    """Copy a model without hooks, and without tensors left by a pass, which may be impossible to copy."""
    attributes = [(module, name, x) for module in model.modules() for name, x in vars(module).items()]
    hooks = [x for module, name, x in attributes if name in _OF_HOOKS and x and isinstance(module, HookPoint)]
    left = [x for _, _, x in attributes if isinstance(x, Tensor) and not x.is_leaf]  # a bridge's last pattern
    tokenizer = getattr(model, "tokenizer", None)  # shared: copying a large one takes as long as a pass
    kept = {id(x): type(x)() for x in hooks} | {id(x): None for x in left} | {id(tokenizer): tokenizer}
    fresh = copy.deepcopy(model, kept)
    fresh.reset_hooks()
    return fresh.eval()


def _drawn_in_place(model: Any) -> bool:
    """Say whether random weights replace those of a copy; another model is made from its configuration."""
    return getattr(getattr(model, "original_model", None), "config", None) is None


def _initialised(model: Any, std: float, seed: int) -> Any:
    fresh = (_drawn if _drawn_in_place(model) else _built_anew)(model, std, seed)
    fresh.cfg.initializer_range = std
    return fresh


def _drawn(model: Any, std: float, seed: int) -> Any:
    fresh, generator = _copied(model), torch.Generator().manual_seed(seed)
    for name, parameter in fresh.named_parameters():
        _draw(name, parameter, std, generator)
    return fresh


@torch.no_grad()
def _draw(name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    last = name.rsplit(".", 1)[-1]
    if last == _SINKS:
        return
    if last.lstrip("_").startswith("b_") or last in ("b", "bias"):  # grouped keys have `_b_K`
        parameter.zero_()
    elif parameter.ndim == 1 and last in ("w", "weight"):
        parameter.fill_(1.0)
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _built_anew(model: Any, std: float, seed: int) -> Any:
    config = copy.deepcopy(model.original_model.config)
    for part in (config, config.get_text_config()):
        for name in _SCALES:
            if hasattr(part, name):
                setattr(part, name, std)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only: torch.manual_seed also seeds all GPUs
        fresh = type(model.original_model)(config)
        fresh = fresh.to(device_of(model), dtype_of(model.original_model))
        fresh = wrapped(fresh, getattr(model, "tokenizer", None))
    for own, other in zip(_attention_parts(model), _attention_parts(fresh), strict=True):
        _keep_attention(own, other)
    return fresh


def _attention_parts(model: Any) -> list[Any]:
    """Return Hugging Face's modules of attention and of its rotation, layer by layer."""
    layers = [layer for layer, block in enumerate(model.blocks) if getattr(block, "attn", None) is not None]
    rotations = [part for layer in layers if (part := rotary_module(model, layer)) is not None]
    return [*(model.blocks[layer].attn.original_component for layer in layers), *dict.fromkeys(rotations)]


@torch.no_grad()
def _keep_attention(own: Any, fresh: Any) -> None:
    """Give a copy the tables, numbers (scale, attention factor) and sinks of a module, as they are now."""
    for name, buffer in own._buffers.items():
        fresh._buffers[name] = None if buffer is None else buffer.detach().clone()
    for name, value in vars(own).items():
        if isinstance(value, float):
            setattr(fresh, name, value)
    if (sinks := own._parameters.get(_SINKS)) is not None:
        fresh._parameters[_SINKS].copy_(sinks)


@torch.no_grad()
def _shuffled(model: Any, seed: int) -> Any:
    fresh, generator = _copied(model), torch.Generator().manual_seed(seed)
    for parameter in fresh.parameters():
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return fresh
