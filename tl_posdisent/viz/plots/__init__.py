"""Plotly figures of result tables. They use your default plotly template; palettes are colour-blind safe."""
