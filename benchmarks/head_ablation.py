"""`head_ablation` against the loop that users write: one forward pass with a hook for every head."""

from __future__ import annotations

from typing import Any

import torch
from common import device, medians, report
from transformers import LlamaConfig, LlamaForCausalLM

from tl_posdisent import bridge_from_hf, head_ablation, hooked_from_hf
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.models.loading.load import has_hooked

LAYERS, HEADS, LENGTH = 6, 16, 128


def six_layers() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=574,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2 * LENGTH,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device())


@torch.no_grad()
def loop(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The plain way."""
    values = []
    for layer in range(LAYERS):
        for head in range(HEADS):

            def hook(z: torch.Tensor, hook: Any, head: int = head) -> torch.Tensor:
                z[:, :, head] = 0.0
                return z

            hooks = [(f"blocks.{layer}.attn.hook_z", hook)]
            values.append(next_token_loss(model.run_with_hooks(tokens, fwd_hooks=hooks), tokens).mean())
    return torch.stack(values).double().cpu()


def main() -> None:
    builders = {"TransformerBridge": bridge_from_hf}
    if has_hooked():
        builders["HookedTransformer"] = hooked_from_hf
    rows = []
    for kind, build in builders.items():
        model = build(six_layers())
        for batch in (1, 8):
            generator = torch.Generator(device()).manual_seed(0)
            tokens = torch.randint(574, (batch, LENGTH), device=device(), generator=generator)
            results: dict[str, torch.Tensor] = {}

            def plain(m: Any = model, t: torch.Tensor = tokens, out: dict[str, torch.Tensor] = results) -> None:
                out["loop"] = loop(m, t)

            def ours(m: Any = model, t: torch.Tensor = tokens, out: dict[str, torch.Tensor] = results) -> None:
                out["ours"] = torch.tensor(head_ablation(m, t, progress=False)["value"].to_numpy())

            times = medians({"loop": plain, "ours": ours}, repeats=3)
            error = results["ours"] - results["loop"]
            rows.append(
                {
                    "class": kind,
                    "texts": batch,
                    "loop s": times["loop"],
                    "head_ablation s": times["ours"],
                    "times faster": times["loop"] / times["ours"],
                    "largest difference": float(error.abs().max()),
                }
            )
    report("head_ablation", f"{LAYERS * HEADS} heads ablated one at a time, {LENGTH} tokens a text", rows)


if __name__ == "__main__":
    main()
