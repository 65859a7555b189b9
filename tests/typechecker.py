"""How annotations are checked under pytest: by beartype, where an integer is also a float, as type checkers have it."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
