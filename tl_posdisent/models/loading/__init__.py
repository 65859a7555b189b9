"""From a directory, a name or a Hugging Face model to a TransformerLens model."""
