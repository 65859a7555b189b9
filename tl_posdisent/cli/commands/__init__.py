"""One file per command: its options, its help, and what it prints."""
