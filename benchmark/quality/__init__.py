"""Costs of options in quality of the answers."""
