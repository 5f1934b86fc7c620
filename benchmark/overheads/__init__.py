"""What our own machinery costs: decisions, tracing, the live page, features of a request."""
