"""What the output owes to heads, positions and parts of scores."""
