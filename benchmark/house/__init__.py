"""How the package is built: its rooms and what each imports."""
