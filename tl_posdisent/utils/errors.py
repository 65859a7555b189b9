"""Errors about one argument, with the argument's name as an attribute."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An invalid argument: its name, and then what is needed, what was given and what to do.

    The message is ``argument`` followed by ``problem``. Callers that use other names (the command line for its options,
    the report for its sections) read the two attributes.

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
    """Tokens exceed the context of a model that fails beyond it; ``length`` and ``context`` are in tokens."""

    def __init__(self, argument: str, problem: str, length: int, context: int) -> None:
        super().__init__(argument, problem)
        self.args = argument, problem, length, context  # the arguments with which pickle recreates it
        self.length, self.context = length, context
