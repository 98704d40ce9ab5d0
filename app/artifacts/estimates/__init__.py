"""Time, memory and disk that making an artifact will take."""
