"""Helpers of the tests: oracles, tiny models of every architecture (`zoo`), processes, pages."""
