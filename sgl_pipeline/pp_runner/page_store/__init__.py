"""Pages between a stage's pool and a store that outlives it: what the stage does beside steps."""
