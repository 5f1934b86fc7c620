"""What the server says of itself: metrics, loads, traces, profiles, the status line."""
