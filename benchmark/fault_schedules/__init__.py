"""The pipeline core under random schedules of messages, workers, requests and memory."""
