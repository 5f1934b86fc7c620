"""Between upstream's HTTP server and the scheduler: checks, refusals and the orderly end."""
