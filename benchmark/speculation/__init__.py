"""The worth of drafts that stages check."""
