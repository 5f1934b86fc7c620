"""What keys and values are worth that outlive the pool."""
