"""Forecasts of memory, time and energy, and plans based on them: pure functions, no I/O."""
