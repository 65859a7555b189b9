"""Pure mathematics: tensors in, frozen dataclasses out. Nothing here knows what a model is."""
