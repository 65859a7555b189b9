"""Figures, tables and pages as HTML, from templates; nothing here runs a model."""
