"""The search of large problems in worker processes, under a deadline."""
