"""Microbatching: how every value grows with the batch, and why a step could not be cut."""
