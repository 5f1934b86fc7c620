"""Pages in a store that outlives the pool: names, files, records, bounds, and the scheduler's
client. Stages write and read objects; the scheduler process alone knows which pages are there."""
