"""Everything that returns fwd_hooks."""
