"""One module per way to write a quantized model."""
