"""TransformerLens: reads a model, returns hooks; never changes or subclasses it."""
