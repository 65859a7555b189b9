"""Load a TransformerLens model from a directory, a name or a Hugging Face model."""
