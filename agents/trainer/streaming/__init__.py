"""Frozen layers that are not on the device: kept in host memory or files, copied when needed."""
