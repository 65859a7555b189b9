"""The laws that carry the package: one parametrized file each, by public functions alone."""
