"""Makes the model directory of a GGUF file; weights stay where they are."""
