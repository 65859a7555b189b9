"""Shares of distances alone and of keys alone: as a generic solver finds them, and solved only when they are read."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from support.masks import CASES
from torch import Tensor

from tl_posdisent import fit_attention
from tl_posdisent.additive import AttentionFit
from tl_posdisent.additive.attention import alone, newton
from tl_posdisent.additive.cells import cell_distances

ALONE = ("explained_distance", "explained_key")


def share(scores: Tensor, mask: Tensor, effects: Tensor, pseudo_count: float = 1e-3) -> float:
    """The share explained by scipy's best logits ``effects @ x``, of texts ``[text, query, key]`` fitted together."""
    own = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    data = torch.lerp(own, mask / mask.sum(-1, keepdim=True).clamp_min(1).double(), pseudo_count)

    def divergence(pattern: Tensor, x: Tensor) -> Tensor:
        logits = effects @ x
        z = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)[mask.any(-1)].sum()
        return z - (pattern * logits).sum() - torch.special.entr(pattern).sum()

    def objective(values: Any) -> tuple[float, Any]:
        x = torch.as_tensor(values).requires_grad_()
        loss = divergence(data, x)
        return loss.item(), torch.autograd.grad(loss, x)[0].numpy()

    start = torch.zeros(effects.shape[-1], dtype=torch.float64)
    found = minimize(objective, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 5000})
    return 1 - float(divergence(own, torch.as_tensor(found.x)) / divergence(own, start))


def effects_of(shape: tuple[int, int, int], features: Tensor | None) -> tuple[Tensor, Tensor]:
    """The design of the distances, and of the keys of each text or of features ``[text, key, feature]``."""
    n_text, n_query, n_key = shape
    d = cell_distances(n_query, n_key)
    by_distance = torch.nn.functional.one_hot(d - d.min()).double().expand(n_text, -1, -1, -1)
    if features is None:
        features = torch.eye(n_text * n_key, dtype=torch.float64).reshape(n_text, n_key, -1)
    return by_distance, features[:, None].expand(-1, n_query, -1, -1)


@pytest.mark.parametrize("bands", [(), (1, 3)], ids=["", "bands"])
@pytest.mark.parametrize("name", ["causal-9", "full-17", "window-3", "fewer-queries", "documents", "random-50"])
def test_shares_are_those_of_a_generic_solver(name: str, bands: tuple[int, ...]) -> None:
    case = CASES[name]
    scores = 1.5 * case.scores(seed=3)[:1]
    fit = fit_attention(scores, bands=bands, **case.options)
    for part, effects in zip(ALONE, effects_of(scores.shape, None), strict=True):
        expected = share(scores, case.mask.expand(scores.shape), effects)
        assert getattr(fit, part).item() == pytest.approx(expected, abs=1e-7), part


def static() -> tuple[Tensor, Tensor]:
    """Scores and keys of two texts, four heads and two key heads."""
    g = torch.Generator().manual_seed(1)
    scores = 2 * torch.randn(2, 4, 10, 10, generator=g, dtype=torch.float64)
    return scores, torch.randn(2, 10, 2, 2, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("pool", [False, True])
def test_shares_of_static_heads_are_those_of_a_generic_solver(pool: bool, sinks: int) -> None:
    scores, keys = static()
    fit, mask = fit_attention(scores, keys=keys, pool=pool, sinks=sinks), torch.ones(10, 10).tril().bool()
    first = torch.eye(10, dtype=torch.float64)[:, :sinks].expand(2, -1, -1)
    for texts in [[0, 1]] if pool else [[0], [1]]:
        for head in range(4):
            features = torch.cat([keys[:, :, head // 2], first], -1)[texts]
            some = scores[texts, head]
            for part, effects in zip(ALONE, effects_of(some.shape, features), strict=True):
                found = getattr(fit, part)[head] if pool else getattr(fit, part)[texts[0], head]
                assert found.item() == pytest.approx(share(some, mask.expand(some.shape), effects), abs=1e-7), part


def fits() -> dict[str, AttentionFit]:
    scores, keys = static()
    return {"free": fit_attention(scores, bands=(2,)), "static": fit_attention(scores, keys=keys)}


def refuse(*arguments: Any) -> Any:
    raise AssertionError("solved")


def test_nothing_is_solved_before_it_is_read_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {kind: [getattr(fit, part) for part in ALONE] for kind, fit in fits().items()}
    with monkeypatch.context() as patched:
        patched.setattr(alone, "solve_attention", refuse)
        patched.setattr(alone, "solve_keys_alone", refuse)
        unread = fits()
        for fit in unread.values():
            fit.pattern(), fit.to_frame("distance"), fit.to_frame("key"), copy.deepcopy(fit), fit.to("cpu")
            with pytest.raises(AssertionError, match="solved"):
                fit.to_frame()
    for kind, fit in unread.items():
        read = [getattr(fit, part) for part in ALONE]
        copies = [copy.copy(fit), copy.deepcopy(fit), pickle.loads(pickle.dumps(fit)), fit.to("cpu")]
        with monkeypatch.context() as patched:
            patched.setattr(alone, "solve_attention", refuse)
            patched.setattr(alone, "solve_keys_alone", refuse)
            for one in [fit, *copies]:
                for part, value, again in zip(ALONE, expected[kind], read, strict=True):
                    assert torch.equal(getattr(one, part), value), kind
                    assert torch.equal(again, value)
                assert one.to_frame()["explained_key"].tolist() == expected[kind][1].flatten().tolist()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda fit: pickle.loads(pickle.dumps(fit))])
def test_copies_made_before_a_share_is_read_have_the_same(way: Any) -> None:
    for fit in fits().values():
        copied = way(fit)
        for part in ALONE:
            assert torch.equal(getattr(copied, part), getattr(fit, part))


def test_shares_are_of_the_data_at_the_time_of_the_fit() -> None:
    """The caller may free or overwrite scores and keys; the fit holds neither the scores nor their memory."""
    scores, keys = static()
    expected, fit = fit_attention(scores.clone(), keys=keys.clone()), fit_attention(scores, keys=keys)
    freed = weakref.ref(scores)
    scores.zero_()
    keys.fill_(7.0)
    del scores
    gc.collect()
    assert freed() is None
    for part in ALONE:
        assert torch.equal(getattr(fit, part), getattr(expected, part))


@pytest.mark.parametrize("options", [{}, {"bands": (4,)}, {"mask": "padded"}], ids=str)
def test_what_a_fit_holds_grows_with_the_length_and_not_with_the_cells(options: dict[str, Any]) -> None:
    sizes = []
    for length in (64, 128):
        if "mask" in options:
            real = torch.ones(length, dtype=torch.bool)
            real[:3] = False
            options = {"mask": torch.ones(length, length).tril().bool() & real & real[:, None]}
        sizes.append(len(pickle.dumps(fit_attention(torch.randn(4, length, length), **options))))
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[1] < 4 * 128 * 128 * 4  # bytes of the scores


def test_shares_do_not_depend_on_torch_modes() -> None:
    scores, keys = static()
    expected = [getattr(fit_attention(scores, keys=keys), part) for part in ALONE]
    with torch.inference_mode():
        inside = fit_attention(scores, keys=keys)
    outside = fit_attention(scores, keys=keys)
    found = [[getattr(inside, part) for part in ALONE]]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found.append([getattr(outside, part) for part in ALONE])
    for values in found:
        for value, wanted in zip(values, expected, strict=True):
            assert torch.equal(value, wanted)


def test_a_share_that_is_not_found_is_nan_with_a_warning_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    scores = torch.randn(3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[1] *= 300
    fit = fit_attention(scores)
    assert not recwarn
    monkeypatch.setattr(newton, "_MAX_STEPS", 1)
    message = r"of 3 fits of attention by distances alone have not converged, at index .*\(1,\).*: their share is NaN"
    with pytest.warns(UserWarning, match=message) as caught:
        missing = fit.explained_distance.isnan()
    if inspect.unwrap(fit_attention) is fit_attention:  # functions with checked annotations have frames of their own
        assert [warning.filename for warning in caught] == [__file__]
    assert missing[1]
    assert torch.equal(fit.explained_distance.isnan(), missing)
    assert len(caught) == 1
    assert fit.explained_key.isfinite().all()  # in closed form


def test_a_representation_solves_only_what_is_small() -> None:
    small, large = fit_attention(torch.randn(2, 9, 9)), fit_attention(torch.randn(2, 600, 600))
    assert f"alone: distance {small.explained_distance.mean():.3f}" in repr(small)
    for text in (repr(large), large._repr_html_()):
        assert "not computed yet" in text or "<table" in text
        assert "explained_key</th>" not in text
    assert not set(ALONE) & set(vars(large))
    key = large.explained_key
    assert f"alone: key {key.mean():.3f}" in repr(large)
    assert "explained_key</th>" in large._repr_html_()
    assert "explained_distance" not in vars(large)
