"""The demo's model, tokenizer and text, all made by `make_demo.py` from nothing but a seed."""
