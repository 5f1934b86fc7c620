"""Which worker should own which layers, from what they cost: a cost model and a planner."""
