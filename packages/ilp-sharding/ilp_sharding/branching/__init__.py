"""Branch and bound for what no bound at the root settles."""
