"""Attention over pages that a server lends to another one, on both sides."""
