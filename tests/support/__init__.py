"""What the tests stand on: tiny models of every architecture (`zoo`), offline."""
