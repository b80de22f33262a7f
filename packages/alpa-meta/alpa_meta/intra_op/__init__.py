"""The strategy of every operator of a stage: one selection problem, its costs, memory, solution."""
