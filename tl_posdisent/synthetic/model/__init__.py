"""The small transformer and its position encodings."""
