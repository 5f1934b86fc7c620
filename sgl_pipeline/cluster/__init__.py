"""Hosts that serve one pipeline together: keys, one port a host, streams, clocks."""
