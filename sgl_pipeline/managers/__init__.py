"""The only room with a door to sglang: it builds and wires everything, and decides nothing."""
