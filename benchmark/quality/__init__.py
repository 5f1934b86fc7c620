"""What an option costs in quality of the answers."""
