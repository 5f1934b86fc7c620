"""Flags, upstream's and ours, turned into each side's arguments."""
