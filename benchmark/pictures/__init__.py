"""Draws the pictures of README and docs."""
