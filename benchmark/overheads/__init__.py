"""Costs of our own machinery: decisions, tracing, the live page, features of a request."""
