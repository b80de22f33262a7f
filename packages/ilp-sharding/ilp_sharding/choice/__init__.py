"""Choices that keep the memory rows: a first one, one from messages, and moves that improve it."""
