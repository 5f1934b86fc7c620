"""Many hosts: the agent of each, the head that they dial, and workers that come from them."""
