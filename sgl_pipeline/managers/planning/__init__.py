"""Commands without a server: fit the costs of a model, show what a layer split brings."""
