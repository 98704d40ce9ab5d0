"""Run the scripts for Windows without Windows: a parser, and an interpreter of what they use."""
