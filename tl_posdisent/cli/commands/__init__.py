"""Commands by subject: their own options, help and output."""
