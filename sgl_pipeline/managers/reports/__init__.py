"""The server's reports on itself: metrics, loads, traces, profiles, log lines, the live page."""
