"""The arrays among a step's inputs and outputs, and which of them a program has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from attrs import frozen
from jax.tree_util import PyTreeDef

from alpa_meta.compat import Var
from alpa_meta.types import PyTree

OutputTree = tuple[PyTreeDef, tuple[PyTree, ...], tuple[bool, ...], tuple[str, ...]]
"""(tree, leaves that are no arrays in place, which leaves are arrays, paths) of a step's result."""


@frozen
class Leaf:
    """One array among the step's inputs or outputs, with the path a user would write.

    A piece of a stacked array has a path of its own, with the layers; `leaf_path` is the array's.
    """

    path: str
    aval: jax.ShapeDtypeStruct
    role: str  # "state", "batch", "constant", or the kind of what a microbatch is given
    weak_type: bool = False
    piece_of: str | None = None
    memory: str = "device"  # between steps, or "pinned_host": that of its host

    @property
    def leaf_path(self) -> str:
        """The path of the user's array."""
        return self.piece_of or self.path

    @property
    def in_parts(self) -> bool:
        """Whether each microbatch has its own part of it, along dim 0."""
        return self.role in ("batch", "part", "number")


@frozen
class Part:
    """What an input or output of a program is of a leaf of the user's arguments or result.

    `leaf` is the leaf's position; [start, stop) the layers along dim 0, None for all of it.
    """

    leaf: int
    start: int | None = None
    stop: int | None = None


@frozen(eq=False)
class LeftOut:
    """What a short program lacks of the one that it stands for (`inter_op.short_step`).

    `layers[l]` is the layer like layer l that stayed, `paths` are those of the inputs that only
    the layers left out read, `copies` by result of an equation how often it counts, if not once.
    """

    layers: Mapping[int, int]
    paths: frozenset[str]
    copies: Mapping[Var, int]


def no_common_dim(batch: Sequence[Leaf]) -> str:
    """Return why the batch arrays of a step can only be taken whole."""
    members: dict[int, list[Leaf]] = {}
    for leaf in batch:
        members.setdefault(leaf.aval.shape[0], []).append(leaf)
    if not members:
        return (
            "no argument of the step looks like a batch (arrays that are not returned as new "
            "state); name the batch arguments with batch_argnums"
        )
    sizes = ", ".join(
        f"{alike[0].path} {alike[0].aval.dtype}{list(alike[0].aval.shape)}"
        + (f" (and {len(alike) - 1} more of {size})" if len(alike) > 1 else "")
        for size, alike in members.items()
    )
    return (
        f"the arrays of the batch differ in their first dim: {sizes}; pass those that are not "
        "cut as arguments of their own, and name the arguments to cut with batch_argnums"
    )
