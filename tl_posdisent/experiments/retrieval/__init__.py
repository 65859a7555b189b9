"""Needles in long texts, and the heads that retrieve them."""
