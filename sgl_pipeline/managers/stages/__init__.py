"""The workers of this server: their processes, their channel, where new ones come from."""
