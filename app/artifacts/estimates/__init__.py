"""Forecasts of the time, memory and disk space of an export."""
