"""Synthetic tasks."""
