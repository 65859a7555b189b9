"""Read what a model's attention layers do by running it: probes, explanations, and the description of a layer."""
