"""Weights as a checkpoint holds them, and their quantized forms."""
