"""`additivity` and position hooks on a whole model, against the model's plain forward pass."""

from __future__ import annotations

import torch
from common import device, medians, report
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tl_posdisent import additivity, bridge_from_hf, dummy_distance, hooked_from_hf, swap_positions
from tl_posdisent.models.loading.load import has_hooked


def pythia_70m_shape() -> GPTNeoXForCausalLM:
    """6 layers, 8 heads, d_model 512, random weights."""
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(config).eval().to(device())


def main() -> None:
    builders = {"TransformerBridge": bridge_from_hf}
    if has_hooked():
        builders["HookedTransformer"] = hooked_from_hf
    rows = []
    for kind, build in builders.items():
        model = build(pythia_70m_shape())
        for length in (512, 2048):
            tokens = torch.randint(
                50304, (1, length), device=device(), generator=torch.Generator(device()).manual_seed(0)
            )
            with torch.no_grad():
                swapped = swap_positions(model, torch.arange(length).flip(0))
                dummy = dummy_distance(model, 5)
                times = medians(
                    {
                        "forward": lambda m=model, t=tokens: m(t),
                        "additivity": lambda m=model, t=tokens: additivity(m, t, progress=False),
                        "swap_positions": lambda m=model, t=tokens, h=swapped: m.run_with_hooks(t, fwd_hooks=h),
                        "dummy_distance": lambda m=model, t=tokens, h=dummy: m.run_with_hooks(t, fwd_hooks=h),
                    },
                    repeats=5,
                )
            shared = {"class": kind, "length": length, "forward s": times["forward"]}
            for name in ("additivity", "swap_positions", "dummy_distance"):
                rows.append(shared | {"tool": name, "tool s": times[name], "ratio": times[name] / times["forward"]})
    report("whole_model", "A model of Pythia-70M's shape with each tool, against one plain forward pass", rows)


if __name__ == "__main__":
    main()
