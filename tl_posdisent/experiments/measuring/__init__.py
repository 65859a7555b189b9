"""Machinery of the experiments: runs of changed models, metrics, losses and tables by layer and head."""
