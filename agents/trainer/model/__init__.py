"""The model under training: its adapters, attention, head, dropout and micro-batches."""
