"""What has happened: steps, moves, recoveries and changes, in memory and in traces."""
