"""Serving in virtual time: the real scheduler and policies over stages that only take time."""
