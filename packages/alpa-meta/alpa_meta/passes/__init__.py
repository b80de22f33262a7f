"""Rewrites of a program before it is planned: each takes a program and returns an equal one."""
