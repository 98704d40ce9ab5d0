"""Ways to reach a PC: SSH, this PC, WSL and loopback."""
