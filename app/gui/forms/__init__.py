"""Widgets for the questions of a form, and for settings."""
