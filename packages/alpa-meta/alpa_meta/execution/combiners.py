"""XLA's combiners on GPUs send collectives together in buckets as large as the cost model prices.

Left to themselves they put results of 30 MiB into one collective: of a reduce-scatter over eight
devices 240 MiB of operands, which are all held until the last of them is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from alpa_interchange import LogicalMesh
from cost_model.collective import BUCKET_BYTES


def combiner_options(mesh: LogicalMesh) -> Mapping[str, int]:
    """Return XLA's options, without those that the user set in XLA_FLAGS.

    XLA counts the bytes of results, the cost model those of the larger side, operands here: a
    reduce-scatter is taken to be over the largest axis of `mesh`.
    """
    shares = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": max(mesh.shape, default=1)}
    options = {
        f"xla_gpu_{kind}_combine_threshold_bytes": int(BUCKET_BYTES) // share
        for kind, share in shares.items()
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}
