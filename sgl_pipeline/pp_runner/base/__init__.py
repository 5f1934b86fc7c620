"""Shared parts of a stage's rooms: inputs of a step, KV formats, copies to the host, threads."""
