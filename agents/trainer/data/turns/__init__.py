"""Parts of a turn that chat templates write in their own way: thoughts and tool calls."""
