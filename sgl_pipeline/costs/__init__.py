"""The work of a step and the milliseconds that it takes."""
