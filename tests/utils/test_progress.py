"""Progress bars: they can be switched off, and an interrupted call says what it keeps."""

from __future__ import annotations

import pytest

from tl_posdisent.utils.progress import NOTHING_KEPT, progress_bar


@pytest.mark.parametrize("disable", [False, True])
def test_a_bar_can_be_switched_off(disable: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(range(3), desc="runs", disable=disable) as bar:
        assert list(bar) == [0, 1, 2]
    assert ("runs: 100%" in capsys.readouterr().err) is not disable


def interrupt(*notes: str | None) -> list[str]:
    """The notes of Ctrl-C inside bars, the innermost first."""
    with pytest.raises(KeyboardInterrupt) as raised:
        nest(list(notes))
    return list(raised.value.__notes__)


def nest(notes: list[str | None]) -> None:
    if not notes:
        raise KeyboardInterrupt
    *inner, outermost = notes
    options = {} if outermost is None else {"interrupted": outermost}
    with progress_bar(disable=True, **options):
        nest(inner)


def test_each_note_is_added_once() -> None:
    assert interrupt(None) == interrupt(None, None) == [NOTHING_KEPT]
    assert interrupt("results are kept", None) == ["results are kept", NOTHING_KEPT]


def test_an_error_gets_no_note() -> None:
    with pytest.raises(ZeroDivisionError) as raised, progress_bar(disable=True):
        raise ZeroDivisionError
    assert not hasattr(raised.value, "__notes__")
