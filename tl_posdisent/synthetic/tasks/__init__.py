"""Tasks for small models: one file for each."""
