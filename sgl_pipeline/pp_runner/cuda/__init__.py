"""What only a stage on an NVIDIA GPU needs: graphs, staging of its inputs, links over the card."""
