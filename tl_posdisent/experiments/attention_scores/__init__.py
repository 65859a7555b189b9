"""Additivity and other measures of attention scores and patterns, by layer and head."""
