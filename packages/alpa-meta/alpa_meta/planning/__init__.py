"""The planner: from a program and a cluster to a parallel plan with a proven bound."""
