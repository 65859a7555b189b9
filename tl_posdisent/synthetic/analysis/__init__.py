"""What trained synthetic models do with positions."""
