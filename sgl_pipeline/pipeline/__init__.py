"""Manages requests, steps and workers without I/O or a clock: one loop for all drivers."""
