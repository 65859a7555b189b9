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
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


class ContextExceeded(ArgumentError):
    """Tokens are longer than the context of a model that fails beyond it: ``length`` and ``context`` in tokens."""

    def __init__(self, argument: str, problem: str, length: int, context: int) -> None:
        super().__init__(argument, problem)
        self.args = argument, problem, length, context  # from which a pickle makes it anew
        self.length, self.context = length, context
