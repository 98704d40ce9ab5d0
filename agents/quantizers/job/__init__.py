"""A quantization job on disk: its folder, its progress and what an earlier try left."""
