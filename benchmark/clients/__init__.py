"""Clients that people use, in virtual environments of their own, run unmodified against us."""
