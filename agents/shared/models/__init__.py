"""Models on disk: config, tokenizer, tensors, sizes and what can be trained."""
