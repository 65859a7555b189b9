"""Small models and tasks for experiments on position: what an encoding makes a transformer learn."""
