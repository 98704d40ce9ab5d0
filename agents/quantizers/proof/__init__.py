"""Compare a quantized model with its original, and derive verdict and card."""
