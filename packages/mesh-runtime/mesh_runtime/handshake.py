"""What driver and workers must agree on before they speak, and the check that they do."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

import jax

from alpa_interchange.document import SCHEMA_VERSION


def identity() -> dict[str, str]:
    """Return the versions that two processes of one runtime must share."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),  # what custom calls of exported programs are resolved by
        "mesh-runtime": version("mesh-runtime"),
        "alpa-interchange": version("alpa-interchange"),
        "schema": ".".join(map(str, SCHEMA_VERSION)),
    }


def disagreement(workers: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return what the workers' versions differ in from this process's, None if in nothing."""
    own = identity()
    found = [
        f"{worker} has {name} {theirs.get(name, 'of no known version')}, this process {ours}"
        for worker, theirs in workers.items()
        for name, ours in own.items()
        if theirs.get(name) != ours
    ]
    if not found:
        return None
    return f"{'; '.join(found)}. Install the same versions in all nodes' environments"
