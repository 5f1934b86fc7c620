"""How fast a server answers, ours beside its peers."""
