"""Forward and backward passes of one rank: layers, CUDA graphs, GPU memory and tuning."""
