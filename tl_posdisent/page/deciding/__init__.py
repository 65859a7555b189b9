"""What follows from measurements: sentences on a model, and on each of its heads."""
