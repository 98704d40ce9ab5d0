"""Parts of every command: parser, output, errors."""
