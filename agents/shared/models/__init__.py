"""Models on disk: config, tokenizer, tensors, sizes, and whether they can be trained."""
