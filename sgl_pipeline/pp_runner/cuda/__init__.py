"""What only a stage on an NVIDIA GPU needs: graphs, staging of its inputs, builds of kernels."""
