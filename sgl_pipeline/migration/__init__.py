"""Decides which worker should own which layers, from their costs: a cost model and a planner."""
