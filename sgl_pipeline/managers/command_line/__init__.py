"""Flags, upstream's and ours, turned into what each side is told."""
