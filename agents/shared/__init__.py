"""Code that both sides use without sending it: models, data, packages and files."""
