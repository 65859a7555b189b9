"""What attention scores are made of."""
