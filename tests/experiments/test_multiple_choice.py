"""Multiple choice: log-likelihoods by hand, and a context that is perturbed while the choices are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import load_demo_model
from tl_posdisent.experiments import MultipleChoice, choice_scores, perturb
from tl_posdisent.hooks import applied

CONTEXT = zoo.random_tokens(10, 1)[0]
CHOICES = [torch.tensor([7, 8, 9]), torch.tensor([20]), torch.tensor([3, 50])]
PADDING = torch.zeros(2, dtype=torch.int64)


def by_hand(model: Any, context: torch.Tensor, choice: torch.Tensor, hooks: Any = ()) -> float:
    """One token at a time, each asked for by itself."""
    whole = torch.cat([context, choice])[None]
    with torch.no_grad(), applied(model, list(hooks)):
        chances = model(whole).double().softmax(-1)[0]
    return sum(float(chances[len(context) + i - 1, t].log()) for i, t in enumerate(choice)) / len(choice)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_scores_are_mean_log_likelihoods(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    got = choice_scores(model, MultipleChoice(CONTEXT, CHOICES, 0))
    expected = [by_hand(model, CONTEXT, choice) for choice in CHOICES]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)
    assert got.max() - got.min() > 0.1


@pytest.mark.parametrize("kind", ["order", "index", "feature"])
def test_the_context_is_perturbed_and_the_choices_are_not(kind: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")

    def perturbation(tokens: Any, **more: Any) -> Any:
        return perturb(model, tokens, kind, 1.0, seed=3, **more)

    got = choice_scores(model, MultipleChoice(CONTEXT, CHOICES, 0), perturb=perturbation)
    for score, choice in zip(got, CHOICES, strict=True):
        whole = torch.cat([CONTEXT, choice])[None]
        perturbed = perturb(model, whole, kind, 1.0, seed=3, until=len(CONTEXT))
        assert perturbed.moved[0, 1:9].all()
        assert not perturbed.moved[0, 10:].any()
        assert torch.equal(perturbed.tokens[0, 10:], choice)
        assert abs(float(score) - by_hand(model, perturbed.tokens[0, :10], choice, perturbed.hooks)) < 1e-5
        assert abs(float(score) - by_hand(model, CONTEXT, choice)) > 1e-3


def test_text_is_tokenised_with_its_beginning_and_perturbed_by_words() -> None:
    model = load_demo_model()
    seen = {}

    def perturbation(tokens: Any, **more: Any) -> Any:
        seen.update(more, text=model.tokenizer.decode(tokens[0]))
        return perturb(model, tokens, "order", 0.0, **more)

    question = MultipleChoice("We the people of the", [" United States", " nation"], 0)
    scores = choice_scores(model, question, perturb=perturbation)
    assert seen == {"text": "<|endoftext|>We the people of the nation", "until": seen["until"], "unit": "word"}
    ids = [model.tokenizer.encode(x, add_special_tokens=False) for x in (question.context, *question.choices)]
    assert seen["until"] == 1 + len(ids[0])
    context = torch.tensor([0, *ids[0]])
    for score, choice in zip(scores, ids[1:], strict=True):
        assert abs(float(score) - by_hand(model, context, torch.tensor(choice))) < 1e-5


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_what_a_model_cannot_answer(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for question, message in [
        (MultipleChoice("a text", CHOICES, 0), "given as text, but the model has no tokenizer"),
        (MultipleChoice(CONTEXT, [" a", " b"], 0), "given as text, but the model has no tokenizer"),
        (
            MultipleChoice(torch.cat([CONTEXT, PADDING]), CHOICES, 0),
            "context must be without padding, .*cut it off",
        ),
        (MultipleChoice(torch.cat([PADDING, CONTEXT]), CHOICES, 0), "context must be without padding"),
        (MultipleChoice(CONTEXT, [CHOICES[0], torch.cat([CHOICES[0], PADDING])], 0), "choices.1. must be without pad"),
    ]:
        with pytest.raises(ValueError, match=message):
            choice_scores(model, question)
    broken = [("unembed.hook_out", lambda x, hook: x * torch.nan)]
    with pytest.raises(ValueError, match="gives the choices log-likelihoods of"), applied(model, broken):
        choice_scores(model, MultipleChoice(CONTEXT, CHOICES, 0))
