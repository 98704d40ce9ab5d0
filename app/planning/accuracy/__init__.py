"""Forecasts compared with measurements, and corrections learned from them."""
