"""Runs the layers of a stage: model, KV pool, attention, sampler, links. Never imports sglang."""
