"""Whether a head's contribution to the predictions needs *where* keys are or *what* they are."""
