"""Preparing a PC to train: checks, the training environment, calibration."""
