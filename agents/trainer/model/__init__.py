"""The model under training: adapters, attention, head, dropout and micro-batches."""
