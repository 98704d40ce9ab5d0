"""A model cut into stages: each rank holds some of the layers, and hands features to the next."""
