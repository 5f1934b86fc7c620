"""Paged attention: one protocol, one file for each backend."""
