"""Tables in, plotly figures out. Figures follow your own plotly template; palettes are safe for the colour-blind."""
