"""What a layer does between its products: one protocol, one file for each backend."""
