"""Validation, files and table columns that every folder uses."""
