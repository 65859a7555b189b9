"""Errors about one argument, which say its name apart from what is wrong with it."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument that cannot be used: its name, and then what is needed, what was given and what to do.

    Whoever calls the function under other names (a command line with its options, a report with its sections) takes
    ``argument`` and ``problem`` apart; the message is both.

    >>> error = ArgumentError("length", "must be an integer of at least 1, got 0")
    >>> error.argument, str(error)
    ('length', 'length must be an integer of at least 1, got 0')
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)

    @property
    def argument(self) -> str:
        """The name of the argument."""
        return str(self.args[0])

    @property
    def problem(self) -> str:
        """The message without the name in front."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


class ContextExceeded(ArgumentError):
    """Tokens are longer than the context of a model that fails beyond it."""

    def __init__(self, argument: str, problem: str, length: int, context: int) -> None:
        super().__init__(argument, problem)
        self.args = argument, problem, length, context  # from which a pickle makes it anew

    @property
    def length(self) -> int:
        """The number of positions that were given."""
        return int(self.args[2])

    @property
    def context(self) -> int:
        """The number of positions that the model takes."""
        return int(self.args[3])
