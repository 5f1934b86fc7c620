"""The worth and the cost of prefill and decode on servers of their own."""
