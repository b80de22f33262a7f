"""Patterns of operators that programs write, and the operators they are equal to.

A file per pattern, registered with the primitives at which it ends. `alpa_meta.passes` applies
them, in an order of its own, and knows no primitive. `former_axes` is no pattern: it says what
collectives over an axis of one member are, which inlining leaves out.
"""

from alpa_meta.operators.rewrites.all_places import ALL_PLACES
from alpa_meta.operators.rewrites.known_places import KNOWN_PLACES
from alpa_meta.operators.rewrites.lookups import BATCHED_LOOKUPS
from alpa_meta.operators.rewrites.mapped_reductions import MAPPED_REDUCTIONS
from alpa_meta.operators.rewrites.picked_blocks import BLOCKS_OF_RECOMPUTATIONS, PICKED_BLOCKS
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite, with_rewrite
from alpa_meta.operators.rewrites.shifts import MERGED_SHIFTS
from alpa_meta.operators.rewrites.summed_products import SUMMED_PRODUCTS
from alpa_meta.operators.rewrites.whole_slices import WHOLE_SLICES

__all__ = [
    "ALL_PLACES",
    "BATCHED_LOOKUPS",
    "BLOCKS_OF_RECOMPUTATIONS",
    "KNOWN_PLACES",
    "MAPPED_REDUCTIONS",
    "MERGED_SHIFTS",
    "PICKED_BLOCKS",
    "SUMMED_PRODUCTS",
    "WHOLE_SLICES",
    "Origins",
    "Rewrite",
    "with_rewrite",
]
