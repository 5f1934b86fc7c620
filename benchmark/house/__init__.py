"""Checks of the package's build: its rooms, their imports, the words of its docstrings."""
