"""State that a block changes is restored at its end, whatever ends it, and also if Ctrl-C interrupts the restoring."""

from __future__ import annotations

import pytest
import torch

from tl_posdisent.utils.restoring import restoring, without_gradients


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whatever_ends_the_block(error: type[BaseException]) -> None:
    kept: list[str] = []
    with pytest.raises(error), restoring(lambda: kept.append("restored")):
        raise error
    assert kept == ["restored"]
    with restoring(kept.clear):
        assert kept
    assert not kept


def test_restoring_that_is_interrupted_is_repeated() -> None:
    state, presses = ["changed", "changed"], [KeyboardInterrupt]

    def restore() -> None:
        state[0] = "restored"
        if presses:
            raise presses.pop()
        state[1] = "restored"

    with pytest.raises(KeyboardInterrupt), restoring(restore):
        pass
    assert state == ["restored", "restored"]


@pytest.mark.parametrize("before", [True, False])
def test_without_gradients(before: bool) -> None:
    with torch.set_grad_enabled(before):
        with pytest.raises(ZeroDivisionError), without_gradients():
            1 / torch.is_grad_enabled()
        assert torch.is_grad_enabled() == before
