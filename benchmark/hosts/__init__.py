"""Hosts made of namespaces on one machine, for tests and measurements over a network."""
