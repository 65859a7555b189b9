"""Files that appear whole or not at all, whoever else writes there."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import pytest
from support.processes import python, wait_until

from tl_posdisent.utils.files import whole_file

WRITE = """
import sys
from tl_posdisent.utils.files import whole_file
for _ in range(30):
    with whole_file(sys.argv[1]) as file:
        for _ in range(64):
            file.write(sys.argv[2].encode() * 4096)
"""


def test_processes_that_write_one_path_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with contextlib.ExitStack() as running:
        writers = [running.enter_context(python(WRITE, str(path), letter)) for letter in "abc"]
        wait_until(path.exists)
        while any(writer.poll() is None for writer in writers):
            content = path.read_bytes()
            assert len(content) == 64 * 4096
            assert len(set(content)) == 1
        assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["table.csv"]


def test_no_symbolic_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one at the path, nor at names that could be foreseen, nor even at the name that was drawn."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("a.txt", "a.txt.unfinished", ".a.txt.unfinished"):
        (folder / name).symlink_to(victim)
    with whole_file(folder / "a.txt") as file:
        file.write(b"mine")
    assert victim.read_text() == "precious"
    assert not (folder / "a.txt").is_symlink()
    assert (folder / "a.txt").read_text() == "mine"
    drawn = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: drawn)
    trap = folder / f".a.txt.{drawn.hex}.unfinished"
    trap.symlink_to(victim)
    with pytest.raises(FileExistsError), whole_file(folder / "a.txt") as file:
        file.write(b"other")
    assert victim.read_text() == "precious"
    assert (folder / "a.txt").read_text() == "mine"
    assert trap.is_symlink(), "what somebody else made was deleted"


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "whole") as file:
        file.write(b"x")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127])
def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path, name: str) -> None:
    with whole_file(tmp_path / name) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == [name]
