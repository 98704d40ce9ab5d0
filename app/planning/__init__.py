"""Forecasts of memory, time and energy, and the plans made of them: pure functions, no I/O."""
