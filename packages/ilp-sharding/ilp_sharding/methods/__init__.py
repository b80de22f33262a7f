"""The ways to solve a reduced problem in the caller's process, from the quickest to the widest."""
