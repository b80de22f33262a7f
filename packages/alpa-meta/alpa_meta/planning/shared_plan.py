"""One plan for all processes of `jax.distributed`: the first plans, the others get what it found.

Every process runs the same program, so each planning by itself would have to come to the same plan;
limits of time, caches and profiles of a machine are enough for two that differ, and then for
collectives that wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from alpa_interchange import ParallelPlan
from alpa_interchange.document import from_json, to_json
from alpa_meta.errors import PlanError
from alpa_meta.options import Options


def is_distributed() -> bool:
    """Return whether this process is one of several of `jax.distributed`."""
    return bool(jax.process_count() > 1)


def check_stages(options: Options) -> None:
    """Refuse to plan several stages for processes that share one program."""
    if options.num_stages not in (None, 1):
        raise PlanError(
            f"num_stages={options.num_stages} under jax.distributed, whose {jax.process_count()} "
            "processes run one program on one mesh; run pipelines on their hosts with "
            "runtime='ray', or leave num_stages out"
        )
    if options.plan is not None and len(options.plan.shardings) > 1:
        raise PlanError(
            f"the plan has {len(options.plan.shardings)} stages, but jax.distributed's "
            f"{jax.process_count()} processes run one program on one mesh; run it with "
            "runtime='ray'"
        )


def agreed_plan(make: Callable[[], ParallelPlan]) -> ParallelPlan:
    """Return, on every process, the plan that `make` gives on the first; its refusal likewise."""
    found, failure = b"", None
    if jax.process_index() == 0:
        try:
            found = b"+" + to_json(make()).encode()
        except Exception as error:  # whatever it is, the others are waiting
            found, failure = b"-" + str(error).encode(), error
    text = _from_first(found).decode()
    if failure is not None:
        raise failure
    if text.startswith("-"):
        raise PlanError(f"process 0 could not plan: {text[1:]}")
    return from_json(text[1:], ParallelPlan, source="the plan of process 0")


def _from_first(content: bytes) -> bytes:
    """Return the bytes that the first process gives."""
    length = multihost_utils.broadcast_one_to_all(np.int32(len(content)))
    padded = np.zeros(int(length), np.uint8)
    if jax.process_index() == 0:
        padded[:] = np.frombuffer(content, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()
