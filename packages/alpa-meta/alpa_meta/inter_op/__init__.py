"""Layers, stages and the submeshes they may run on: what the stage DP chooses between."""
