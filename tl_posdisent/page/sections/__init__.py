"""One file for each section of the report: how it is measured, what it shows, and what it adds to the verdict."""
