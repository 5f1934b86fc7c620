"""Weights of 8 and 4 bits: what they are, how checkpoints store them, how 16 bits become them."""
