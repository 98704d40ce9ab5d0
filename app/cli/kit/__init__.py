"""What every command is made of: its parser, its output, its errors."""
