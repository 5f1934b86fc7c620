"""The work of a layer except attention: one protocol, one file for each backend."""
