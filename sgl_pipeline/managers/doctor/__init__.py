"""The command `doctor`: what a cluster's hosts and links are like, before a server runs on them."""
