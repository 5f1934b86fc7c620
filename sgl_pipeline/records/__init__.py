"""Records of steps, moves, recoveries and changes, in memory and in traces."""
