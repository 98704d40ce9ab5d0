"""Painted charts: sparklines for cards, zoomable plots for the run page."""
