"""A question asked of a model and a text; a pandas table out."""
