"""The messages and orders between scheduler and stages."""
