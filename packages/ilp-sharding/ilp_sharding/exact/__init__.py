"""Optima of what is small or narrow: elimination, with labels under memory rows, and HiGHS."""
