"""Flat parameters, optimizers, the learning-rate schedule and the loss scale of fp16."""
