"""Comparing a quantized model with its original, and the verdict and card that follow."""
