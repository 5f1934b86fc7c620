"""Other engines on a CPU machine, to be measured beside ours."""
