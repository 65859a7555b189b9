"""Laws of loading: what comes out computes what went in, and what would not is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from jaxtyping import TypeCheckError
from support import zoo
from support.tolerance import rounding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tl_posdisent import head_ablation, swap_positions
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading import convert as conversion
from tl_posdisent.models.loading import load as loading
from tl_posdisent.models.loading.convert import check_same_logits, hf_logits
from tl_posdisent.models.loading.load import bridge_from_hf, check_backend, has_hooked, hooked_from_hf, load_model

CONVERT = {"hooked": hooked_from_hf, "bridge": bridge_from_hf}


def llama(**changes: Any) -> LlamaForCausalLM:
    """A small random Llama whose weights are large enough for positions to matter to the logits."""
    options: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**options)).eval()


def neox(**rope: Any) -> GPTNeoXForCausalLM:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **rope}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=100,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=256,
                rope_parameters=parameters,
                initializer_range=0.3,
            )
        ).eval()


def some_tokens(*, vocabulary: int = 100, length: int = 200) -> torch.Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMAS = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "base": rope("default", rope_theta=500.0),
    "linear": rope("linear", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
}


OTHERS: dict[str, Any] = {
    "neox": neox,
    "neox base": lambda: neox(rope_theta=500.0),  # TransformerLens' converter takes 10000 whatever the model says
    "gpt2": lambda: zoo.hf_model("gpt2"),
    "qwen3": lambda: zoo.hf_model("qwen3"),
}


@pytest.mark.parametrize("backend", zoo.KINDS)
@pytest.mark.parametrize("name", [*LLAMAS, *OTHERS])
def test_the_same_on_tokens_that_the_self_check_has_not_seen(name: str, backend: str) -> None:
    hf_model = OTHERS[name]() if name in OTHERS else llama(**LLAMAS[name])
    tokens = some_tokens(vocabulary=60, length=120)
    expected = hf_logits(hf_model, tokens)
    with torch.no_grad():
        got = CONVERT[backend](hf_model)(tokens)
    assert relative_error(got, expected) < 1e-4


@zoo.needs_hooked
def test_scalings_that_the_converter_ignores_are_refused() -> None:
    """Also one that changes beyond the tokens on which the two are compared."""
    with pytest.raises(ValueError, match="does not compute what the original does"):
        hooked_from_hf(neox(rope_type="linear", factor=8.0))
    with pytest.raises(ValueError, match=r"change with the length of the text \(rope_type dynamic\)"):
        hooked_from_hf(llama(**rope("dynamic", factor=4.0)))


@zoo.needs_hooked
def test_a_wrong_slow_frequency_is_refused_even_where_logits_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these weights positions hardly reach the logits, so only the rotary tables can tell."""
    hf_model = llama(initializer_range=1e-3, **LLAMAS["llama3"])
    hooked_from_hf(hf_model)  # right, hence accepted
    monkeypatch.setattr(conversion, "_llama_fields", lambda model, rope: {"use_NTK_by_parts_rope": False})
    with pytest.raises(ValueError, match="rotary frequencies differ"):
        hooked_from_hf(hf_model)


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float16, "load it in bfloat16 or float32$"), (torch.float32, "its weights may not be")]
)
def test_logits_that_are_not_finite_in_the_original_are_its_own(
    dtype: torch.dtype, advice: str, tmp_path: Path
) -> None:
    """As those of Gemma 3 in float16, which overflows: the class of TransformerLens is not to blame."""
    hf_model = llama()
    with torch.no_grad():
        hf_model.model.layers[0].mlp.down_proj.weight.mul_(1e8 if dtype == torch.float16 else torch.nan)
    hf_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model must have finite logits, .*, in {dtype}: {advice}"):
        load_model(tmp_path, dtype=dtype)
    if dtype == torch.float16:
        load_model(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_an_unknown_architecture_is_refused_with_its_name(backend: str) -> None:
    class Unheard(LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match=r"cannot (convert|wrap) Unheard"):
        CONVERT[backend](Unheard(llama().config))


@zoo.needs_hooked
def test_code_from_a_repository_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLens would by itself trust the code of this model."""
    asked: list[dict[str, Any]] = []

    def from_pretrained(source: str, **options: Any) -> None:
        asked.append(options)
        raise OSError(f"{source} is not here")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="Qwen/Qwen-7B is not here"):
        load_model("Qwen/Qwen-7B", backend="hooked")
    assert [options["trust_remote_code"] for options in asked] == [False]


@zoo.needs_hooked
def test_conversion_leaves_the_original_and_the_warning_filters_alone() -> None:
    hf_model = llama().train()
    hf_model.model.layers[0].eval()
    training = {name: part.training for name, part in hf_model.named_modules()}
    before = {name: value.clone() for name, value in hf_model.state_dict().items()}
    filters = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        model = hooked_from_hf(hf_model)
    assert {name: part.training for name, part in hf_model.named_modules()} == training
    assert not model.training
    assert warnings.filters == filters
    with torch.no_grad():
        model.embed.W_E.zero_()  # a copy, not a view
    assert all(torch.equal(value, before[name]) for name, value in hf_model.state_dict().items())


@pytest.mark.parametrize("backend", zoo.KINDS)
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_directory_gives_the_logits_of_hugging_face(tmp_path: Path, backend: Any, with_tokenizer: bool) -> None:
    hf_model = llama(head_dim=16)
    folder = tmp_path / "a-llama"  # TransformerLens' own loader takes such a path for a model name
    hf_model.save_pretrained(folder)
    if with_tokenizer:
        demo_tokenizer().save_pretrained(folder)
    model = load_model(folder, backend=backend)
    tokens = some_tokens()
    with torch.no_grad():
        assert relative_error(model(tokens), hf_logits(hf_model, tokens)) < 1e-4
    if with_tokenizer:
        ids = model.to_tokens("We the people")[0].tolist()
        assert ids == demo_tokenizer().encode("We the people")
        assert ids[0] == 0


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_a_text_of_a_tokenizer_without_bos_begins_with_eos(tmp_path: Path, backend: Any) -> None:
    """So TransformerLens encodes it, and what is given as text is measured with that token."""
    words = Tokenizer(WordLevel({"we": 3, "the": 4, "people": 5, "?": 6, "<eos>": 7}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="?")
    assert tokenizer("we the people")["input_ids"] == [3, 4, 5]
    llama().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_model(tmp_path, backend=backend)
    assert model.to_tokens("we the people").tolist() == [[7, 3, 4, 5]]
    plain = model.to_tokens("we the people", prepend_bos=False)
    assert plain.tolist() == [[3, 4, 5]]
    options: Any = {"layers": 0, "heads": 0, "progress": False}
    given: list[Any] = ["we the people", torch.tensor([[7, 3, 4, 5]]), plain]
    text, with_eos, without = (head_ablation(model, x, **options)["baseline"].item() for x in given)
    assert text == with_eos != without


def test_auto_takes_hooked_where_it_is_right_and_the_bridge_where_it_is_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    llama().save_pretrained(good)
    neox(rope_type="linear", factor=8.0).save_pretrained(bad)
    assert type(load_model(good)).__name__ == ("HookedTransformer" if has_hooked() else "TransformerBridge")
    model = load_model(bad)
    assert type(model).__name__ == "TransformerBridge"
    with torch.no_grad():
        got = model(some_tokens())
    assert relative_error(got, hf_logits(neox(rope_type="linear", factor=8.0), some_tokens())) < 1e-4


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, TypeCheckError), match="keras"):
        load_model(tmp_path, backend="keras")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differ by nan"):
        check_same_logits(torch.full((1, 1, 2), torch.nan), torch.ones(1, 1, 2), what="it")
    monkeypatch.setattr("tl_posdisent.models.loading.load.has_hooked", lambda: False)
    with pytest.raises(ValueError, match="has no HookedTransformer, use backend='bridge'"):
        hooked_from_hf(llama())
    check_backend("auto")


@pytest.mark.parametrize(("name", "why"), [("no-one/no-such-model", "couldn't connect"), ("x/y/z", "Repo id must be")])
def test_a_repository_that_is_not_there(name: str, why: str) -> None:
    """The name and those that need no repository come before the words of transformers, whose error is the cause."""
    message = f"^'{name}' is no folder here, .*: smollm2, gemma3-270m; .*load_demo_model.*: .*{why}"
    with pytest.raises(OSError, match=message) as caught:
        load_model(name)
    assert why in str(caught.value.__cause__)


def test_what_transformers_says_of_a_repository_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("no-one/model does not appear to have a file named config.json")
    monkeypatch.setattr(loading, "read_checkpoint", Mock(side_effect=error))
    with pytest.raises(OSError, match=r"^no-one/model does not appear") as caught:
        load_model("no-one/model")
    assert caught.value is error


PATHS = ["/no/folder", "./smollm2", "../none", "~/none", Path("nowhere"), Path("no-one/model")]
NO_NAMES: dict[Any, str] = {
    "": "must be the folder of a model, or a model's name, got ''",
    **{x: f"must be the folder of a model, or a model's name, got '{x}', where no folder is" for x in PATHS},
    "~/none": "must be .*, where no folder is: write ~ as Path.home()",
    **{x: f"cannot be '{x}': did you mean 'smollm2'?" for x in ("smolm2", "SmolLM2", "smollm-2", "smol")},
    **{x: f"cannot be '{x}': did you mean 'gemma3-270m'?" for x in ("gemma3", "Gemma", "gemma3-270")},
    **{x: rf"cannot be '{x}': did you mean load_demo_model\(\)" for x in ("demo", "Demo")},
}


@pytest.mark.parametrize(("name", "message"), NO_NAMES.items(), ids=[repr(x) for x in NO_NAMES])
def test_what_names_no_model_is_refused(
    name: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TransformerLens, or a network, is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_lens", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match=f"^name_or_dir {message}"):
        load_model(name, backend="hooked")


def test_a_gguf_file_is_left_to_transformers(tmp_path: Path) -> None:
    message = r"name_or_dir must be .*, got a GGUF file: load it with transformers, .*gguf_file=name"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "a model.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_may_differ_by_rounding_alone(dtype: torch.dtype) -> None:
    """By a thousandth of the largest, or in 16 bits by a tenth of the root mean square."""
    expected = torch.randn(2, 50, 999, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = expected.clone()
    check_same_logits(got, expected, what="it")
    got[-1, -1] += 7 if dtype == torch.bfloat16 else 0.1
    difference, size = got.double() - expected.double(), expected.double()
    if dtype == torch.float32:
        error, allowed = difference.abs().max(), 1e-3 * size.abs().max()
    else:
        error, allowed = (x.square().mean().sqrt() for x in (difference, size))
        allowed = 0.1 * allowed
    assert error > allowed
    with pytest.raises(ValueError, match=f"differ by {error:.3g} .allowed {allowed:.3g}"):
        check_same_logits(got, expected, what="it")


# --- a longer context -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gptj", "llama-gqa", "llama-yarn"))
def test_a_model_loaded_with_a_longer_context_is_one_built_longer(kind: Any, name: str, tmp_path: Path) -> None:
    short = {"n_positions" if name == "gptj" else "max_position_embeddings": 64}
    zoo.hf_model(name, **short).save_pretrained(tmp_path)
    tokens, model = zoo.random_tokens(128), load_model(tmp_path, backend=kind, n_ctx=128)
    assert model.cfg.n_ctx == 128
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), zoo.load(kind, name)(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_positions_beyond_the_first_context_are_positions(kind: Any, name: str, tmp_path: Path) -> None:
    """Moved by a constant they change nothing."""
    zoo.hf_model(name, max_position_embeddings=64).save_pretrained(tmp_path)
    tokens, model = zoo.random_tokens(128), load_model(tmp_path, backend=kind, n_ctx=128)
    with torch.no_grad():
        moved = model.run_with_hooks(tokens, fwd_hooks=swap_positions(model, torch.arange(128) + 3))
        torch.testing.assert_close(moved, model(tokens), rtol=0, atol=2e-3)


def test_a_context_that_cannot_be_longer_is_refused(tmp_path: Path) -> None:
    """Where positions are learned, or the rotation depends on the context."""
    zoo.hf_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"1 tensors that are missing or have another shape \(transformer\.wpe"):
        load_model(tmp_path / "gpt2", n_ctx=200)
    llama(**rope("dynamic", factor=4.0)).save_pretrained(tmp_path / "dynamic")
    with pytest.raises(ValueError, match=r"n_ctx must be None .* rotation depends on its context \(dynamic\)"):
        load_model(tmp_path / "dynamic", n_ctx=512)
    with pytest.raises(ValueError, match="n_ctx must be an integer"):
        load_model(tmp_path / "dynamic", n_ctx=0)


@zoo.needs_hooked
@pytest.mark.parametrize("window", [60, 1500])
def test_windows_of_any_size_are_converted_or_refused(window: int) -> None:
    """Qwen 2's are not converted, Mistral's are; a text shorter than the window does not show it."""
    small = {
        **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    }
    sliding = transformers.Qwen2Config(**small, use_sliding_window=True, max_window_layers=1, sliding_window=window)
    with pytest.raises(ValueError, match=rf"does not compute|are \[None, None\] instead of \[None, {window}\]"):
        hooked_from_hf(transformers.Qwen2ForCausalLM(sliding))
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**small, sliding_window=window)).eval()
    tokens = some_tokens(length=window + 100)[:1]
    with torch.no_grad():
        assert relative_error(hooked_from_hf(mistral)(tokens), hf_logits(mistral, tokens)) < 1e-4


class Adapted(torch.nn.Module):
    """A linear map with an adapter beside it, as PEFT puts one in its place."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = base_layer, base_layer.weight
        sizes = (base_layer.in_features, 2, base_layer.out_features)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(sizes[0], sizes[1], bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(sizes[1], sizes[2], bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PeftModel(torch.nn.Module):
    """The model around one with adapters, as PEFT has it."""

    def merge_and_unload(self) -> None: ...


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_adapters_that_are_not_merged(backend: str) -> None:
    """A bridge runs the adapted map itself, and everything else is refused with advice."""
    with pytest.raises(ValueError, match=r"got PeftModel: merge its adapters, hf_model\.merge_and_unload"):
        CONVERT[backend](PeftModel())
    hf_model = llama()
    attention = hf_model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    if backend == "hooked":
        with pytest.raises(ValueError, match=r"got one at model.layers.0.self_attn.q_proj: merge them"):
            CONVERT[backend](hf_model)
    else:
        tokens = torch.arange(10)[None]
        expected = hf_model(tokens).logits
        torch.testing.assert_close(CONVERT[backend](hf_model)(tokens), expected, rtol=0, atol=rounding(expected, 16))


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_models_without_logits_are_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="hf_model must return logits, got LlamaModel, which has no language-mod"):
        CONVERT[backend](llama().model)


@zoo.needs_hooked
def test_a_refusal_of_one_backend_names_the_other(tmp_path: Path) -> None:
    zoo.hf_model("gemma2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'Gemma2ForCausalLM .*; use backend="bridge"$') as caught:
        load_model(tmp_path, backend="hooked")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_an_original_that_fails_by_itself_is_refused_as_such(backend: str) -> None:
    """As kernels of quantised weights do for some sizes."""
    hf_model = llama()
    hf_model.model.layers[1].mlp.down_proj.forward = lambda x: x.view(3, -1, 7)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"model must run, but LlamaForCausalLM fails on 128 tokens .RuntimeError: sh"):
        CONVERT[backend](hf_model)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device must be one that torch can use, got 'cuda:99'"):
        load_model(tmp_path, device="cuda:99")
