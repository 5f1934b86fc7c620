"""Layers that move between stages of a running server: what it gains and costs."""
