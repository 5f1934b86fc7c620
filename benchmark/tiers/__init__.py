"""The worth of keys and values that outlive the pool."""
