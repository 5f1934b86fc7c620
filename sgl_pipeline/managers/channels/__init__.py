"""Sockets between the server's processes, and the directory that holds them."""
