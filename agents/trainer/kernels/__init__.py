"""Custom kernels: attention, NF4 dequantization, LoRA products and cross-entropy."""
