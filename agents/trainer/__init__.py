"""One rank of a training run: plain PyTorch over Transformers and PEFT."""
