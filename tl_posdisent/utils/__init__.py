"""Validation, files and table columns, for use in every folder."""
