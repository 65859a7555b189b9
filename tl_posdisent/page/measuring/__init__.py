"""What a report measures: the model and its texts, the result of a section, random copies, panels of heads."""
