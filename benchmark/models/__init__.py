"""Writes checkpoints to measure with."""
