"""What follows from measurements: the rule for *where* and *what*, and sentences of more than one section."""
