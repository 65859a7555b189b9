"""Plotly figures of result tables. They follow your own plotly template; palettes are colour-blind safe."""
