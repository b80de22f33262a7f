"""Checkpoints: the state of a step in a folder, whatever plan produced it, for any other plan.

One checkpoint is a directory `step-<number>` that orbax-checkpoint reads without this package, with
`alpa.json` beside orbax's files: the step, the kind of each leaf, and the SHA-256 of every file.
"""
