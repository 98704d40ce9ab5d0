"""Transports to a PC: SSH, this PC itself, WSL and loopback."""
