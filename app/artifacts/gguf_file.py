"""What a GGUF file says of itself; nodes read it in the same way."""

from agents.shared.models.gguf_file import read_metadata as read_metadata
