"""Parts that only a stage on an NVIDIA GPU needs: graphs, and staging of its inputs and outputs."""
