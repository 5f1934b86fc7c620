"""Prefill and decode on servers of their own: what their schedulers say to each other, and the
state machine of either side.

A decode server reads the pages of a prompt out of the pool of the prefill server that has computed
it. No I/O, clock or randomness: messages and the caller's moments go in, messages come out.
"""
