"""Attention fitted to some texts and put in on others: the ladder's static rungs as hooks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from support import zoo
from support.tolerance import rounding

from tl_posdisent import attention_ladder, capture, fit_attention
from tl_posdisent.hooks import applied, substitute_attention
from tl_posdisent.models.running.forward_pass import running

TOKENS = zoo.random_tokens(length=12, batch=5)
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
pytestmark = pytest.mark.filterwarnings("ignore:a static head's direction")


@FEW
@pytest.mark.parametrize("by", ["distance", "distance+sink", "static"])
def test_the_loss_is_that_of_the_ladder(kind: str, name: str, by: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = substitute_attention(model, by, fitted_to=TOKENS[:3], layers=1)
    table = attention_ladder(
        model, TOKENS[:3], heldout=TOKENS[3:], layers=1, unit="layer", rungs=[by], controls=[], progress=False
    ).set_index("rung")
    with torch.no_grad(), applied(model, hooks):
        log_p = model(TOKENS[3:])[:, :-1].log_softmax(-1)
    loss = -log_p.gather(-1, TOKENS[3:, 1:, None]).mean()
    assert loss.item() == pytest.approx(table.loc[by, "loss"], abs=rounding(loss, 2))
    assert abs(loss.item() - table.loc["untouched", "loss"]) > 1e-4


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_the_pattern_is_that_of_the_fit(kind: str, name: str, shared_model: Any) -> None:
    """All heads of both layers, each fitted in the unmodified model."""
    model, seen = shared_model(kind, name), list[torch.Tensor]()
    hooks = substitute_attention(model, "distance+sink", fitted_to=TOKENS[:3])
    listen = ("blocks.1.attn.hook_pattern", lambda x, hook: seen.append(x.detach()))
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, listen]):
        model(TOKENS[3:])
    (scores,) = capture(model, TOKENS[:3], lambda x: x.scores, layers=1)
    fit = fit_attention(scores, keys=scores.new_zeros(3, 12, 1, 0), sinks=1, pool=True)
    expected = fit.static_scores(scores.new_zeros(2, 12, 1, 0)).softmax(-1)
    torch.testing.assert_close(seen[0], expected.to(seen[0]), rtol=1e-3, atol=1e-4)


def test_one_text_at_a_time_and_together_are_the_same_fit(shared_model: Any) -> None:
    """Texts of unequal length are fitted after their passes, those of equal length within theirs."""
    model = shared_model("bridge", "llama-gqa")
    padded = torch.nn.functional.pad(TOKENS[:3], (0, 4))
    mask = torch.nn.functional.pad(torch.ones_like(TOKENS[:3]), (0, 4))
    longer = torch.cat([padded, zoo.random_tokens(length=16, batch=1)])
    outputs = []
    for texts in (TOKENS[:3], {"input_ids": padded, "attention_mask": mask}):
        with torch.no_grad(), applied(model, substitute_attention(model, "static", fitted_to=texts)):
            outputs.append(model(TOKENS[3:]))
    torch.testing.assert_close(outputs[0], outputs[1])
    full = torch.cat([mask, torch.ones(1, 16, dtype=mask.dtype)])
    unequal = {"input_ids": longer, "attention_mask": full}
    with torch.no_grad(), applied(model, substitute_attention(model, "static", fitted_to=unequal)):
        assert (model(TOKENS[3:]) - outputs[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("by", ["distance", "distance+sink", "static"])
def test_texts_of_each_length_are_run_once_for_all_layers(kind: str, name: str, by: Any, shared_model: Any) -> None:
    """Not once for each layer, unless their scores take more memory than is set aside; the fits are the same."""
    model, outputs = shared_model(kind, name), list[torch.Tensor]()
    texts = [TOKENS[0], TOKENS[1, :9], TOKENS[2, :7], TOKENS[3]]
    for memory, passes in ((2**28, 3), (0, 3 * model.cfg.n_layers)):
        with pytest.MonkeyPatch.context() as patch, running(model) as p, p.counting_tokens() as counts:
            patch.setattr(import_module(substitute_attention.__module__), "_BYTES_OF_SCORES", memory)
            hooks = substitute_attention(model, by, fitted_to=texts)
        layers = model.cfg.n_layers if memory else (model.cfg.n_layers + 1) / 2  # those before the one that is fitted
        assert len(counts) == passes * layers
        with torch.no_grad(), applied(model, hooks):
            outputs.append(model(TOKENS[4:]))
    assert torch.equal(*outputs)


@pytest.mark.usefixtures("unchecked")
def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match="by must be 'distance', 'distance\\+sink' or 'static', got 'additive'"):
        substitute_attention(model, "additive", fitted_to=TOKENS)
    hooks = substitute_attention(model, "distance", fitted_to=TOKENS[:, :8])
    with pytest.raises(ValueError, match="distance"), applied(model, hooks):
        model(TOKENS)


@pytest.mark.parametrize("by", ["uniform", "distance", "distance+sink"])
def test_a_learned_sink_keeps_its_attention_but_not_by_query(by: str, shared_model: Any) -> None:
    """Its share is a key's: the same in all texts at queries of as many keys, and the head's own in sum."""
    model, tokens = shared_model("bridge", "gpt_oss"), zoo.random_tokens(12, 4, seed=3)
    name = "blocks.1.attn.hook_pattern"

    def shares(hooks: Any) -> torch.Tensor:
        with torch.no_grad(), applied(model, hooks):
            return 1 - model.run_with_cache(tokens, names_filter=name)[1][name].double().sum(-1)

    own = shares([])
    fitted = by != "uniform"
    new = shares(substitute_attention(model, by, fitted_to=tokens if fitted else None, layers=1))
    assert own.std(0).max() > 0.05
    summed = (0, 2) if fitted else 2  # else each text is fitted
    torch.testing.assert_close(new.sum(summed), own.sum(summed), rtol=1e-5, atol=1e-5)
    if fitted:
        assert new.std(0).max() < 1e-6
    else:
        odds = (new / (1 - new)).log() + torch.arange(1, 13).log()  # against one key
        assert odds.std(-1).max() < 1e-4
