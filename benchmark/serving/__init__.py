"""Speeds of servers, ours beside its peers."""
