"""One problem in three forms, each made from the one before.

`Instance` (flat arrays, pins applied) -> `Network` (a graph of tables that the exact reductions
shrink) -> `TableGraph` (what is left, as flat arrays for compiled loops). `MemoryProfile` holds the
memory rows over the strategies that a `Network` still has.
"""
