"""Rewrites of a program before it is planned: each takes a program and returns an equal one.

`order` says in which order, and why.
"""
