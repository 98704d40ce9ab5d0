"""Forward and backward passes of one rank: layers, recorded launches, memory and tuning."""
