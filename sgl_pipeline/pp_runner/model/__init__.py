"""The model: its spec, its weights, its layers."""
