"""Training data: read files, tokenize, pack, cache and order examples."""
