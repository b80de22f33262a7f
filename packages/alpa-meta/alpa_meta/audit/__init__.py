"""Checks that a compiled program is its plan."""
