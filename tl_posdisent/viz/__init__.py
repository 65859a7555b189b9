"""Results in, pictures out: plotly figures and circuitsvis widgets, returned and never shown."""
