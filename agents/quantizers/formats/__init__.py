"""One module per method of writing a quantized model."""
