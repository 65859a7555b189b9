"""Validation, files and table columns that every room uses."""
