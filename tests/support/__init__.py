"""What the tests stand on: tiny models of every architecture (`zoo`) and a real one (`stories`), offline."""
