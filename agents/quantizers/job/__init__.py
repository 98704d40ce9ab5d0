"""A quantization job on disk: its folder, its progress, and results of earlier tries."""
