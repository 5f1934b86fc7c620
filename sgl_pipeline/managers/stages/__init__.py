"""The workers of this server: their processes, their channel, and the source of new ones."""
