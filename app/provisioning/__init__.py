"""Making a PC fit to train: checks, the training environment, calibration."""
