"""How much memory the tools take, by length, heads and layers: one process for each cell of the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import in_a_process, peak, report
from transformers import LlamaConfig, LlamaForCausalLM

import tl_posdisent as tp
from tl_posdisent.models.loading.load import has_hooked

D_HEAD, VOCABULARY = 32, 1000
GRID = [(length, heads, layers) for length in (512, 1024, 2048, 4096) for heads in (8, 16) for layers in (2, 6)]


def model_of(kind: str, length: int, heads: int, layers: int) -> Any:
    """A Llama with random weights, and half as many key heads as query heads."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * D_HEAD,
        intermediate_size=4 * heads * D_HEAD,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    build = {"bridge": tp.bridge_from_hf, "hooked": tp.hooked_from_hf}[kind]
    return build(LlamaForCausalLM(config).eval())


def linear(model: Any, tokens: torch.Tensor) -> None:
    """Additive fits from queries and keys, one layer after the other."""
    for layer in tp.capture(model, tokens, scores=False):
        tp.fit_additive_qk(layer.q_rot, layer.k_rot, scale=layer.spec.require_scale())


TOOLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "forward": lambda model, tokens: model(tokens),
    "additivity": lambda model, tokens: tp.additivity(model, tokens, progress=False),
    "queries and keys": linear,
    "controlled_distance": lambda model, tokens: tp.controlled_distance(model, tokens, progress=False),
    "subspace_patterns": lambda model, tokens: tp.subspace_patterns(model, tokens, progress=False),
}


def one(kind: str, length: int, heads: int, layers: int) -> None:
    """In a process of its own: the peak of every tool above the loaded model, in MiB."""
    model = model_of(kind, length, heads, layers)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    for tool in TOOLS.values():
        with torch.no_grad():
            tool(model, tokens[:, :64])
    with torch.no_grad():
        print(json.dumps({name: peak(lambda f=TOOLS[name]: f(model, tokens)) for name in TOOLS}))


def main() -> None:
    for kind in ["bridge", *(["hooked"] if has_hooked() else [])]:
        rows: list[dict[str, Any]] = []
        for length, heads, layers in GRID:
            peaks = {name: round(mib) for name, mib in in_a_process(__file__, kind, length, heads, layers).items()}
            scores = heads * length**2 * 4 / 2**20
            rows.append({"length": length, "heads": heads, "layers": layers, "a layer's scores": scores} | peaks)
        report(f"memory_{kind}", f"MiB at most above the loaded model ({kind}, d_head {D_HEAD}, float32)", rows)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        one(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main()
