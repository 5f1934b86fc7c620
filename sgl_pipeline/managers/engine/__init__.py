"""An engine without a server: a process that answers the program that has started it."""
