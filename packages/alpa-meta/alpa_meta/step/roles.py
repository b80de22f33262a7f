"""What each input of a step is: state that the step replaces, a part of the batch, or a constant.

An argument is state if the result, or an element of it, has its structure, shapes and dtypes. Of
the rest, arrays with dims are the batch, except random keys; arguments named as the batch are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from alpa_meta.step.arguments import Arguments, abstract
from alpa_meta.types import PyTree


def input_roles(
    arguments: Arguments,
    result: tuple[PyTreeDef, Sequence[PyTree]],
    array_results: Sequence[bool],
    batch_argnums: tuple[int, ...] | None,
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return the role of each input array and, per output array, the input it replaces.

    `result` is the structure of the step's and its leaves, with shapes and dtypes for arrays, which
    classes of users need not take (jmp's do not); `array_results` marks its arrays.
    """
    spans = _elements(*result, arguments)
    number_of_leaf, count = {}, 0
    for leaf_number, is_array in enumerate(array_results):
        if is_array:
            number_of_leaf[leaf_number] = count
            count += 1
    aliases: list[int | None] = [None] * count
    taken: set[int] = set()
    roles = ["constant"] * sum(arguments.dynamic)
    dynamic_number = np.cumsum(arguments.dynamic) - 1
    for argnum in dict.fromkeys(arguments.argnums):
        members = arguments.members(argnum)
        named = batch_argnums is not None and argnum in batch_argnums
        chosen = None if named else _matching(argnum, arguments, spans, taken)
        if chosen is not None:
            taken.add(chosen)
            _, start, _ = spans[chosen]
            for offset, member in enumerate(members):
                if arguments.dynamic[member]:
                    roles[dynamic_number[member]] = "state"
                    aliases[number_of_leaf[start + offset]] = int(dynamic_number[member])
        elif batch_argnums is None or named:
            for member in members:
                leaf = arguments.leaves[member]
                if arguments.dynamic[member] and np.ndim(leaf) and (named or not _is_key(leaf)):
                    roles[dynamic_number[member]] = "batch"
    return tuple(roles), tuple(aliases)


def _elements(
    structure: PyTreeDef, leaves: Sequence[PyTree], arguments: Arguments
) -> list[tuple[PyTreeDef, int, Sequence[PyTree]]]:
    """Return (structure, first leaf, leaves) of each part of the result that may be new state: the
    whole result if it is one argument's, else its elements.
    """
    whole = (structure, 0, leaves)
    for argnum in dict.fromkeys(arguments.argnums):
        if _matching(argnum, arguments, [whole], set()) is not None:
            return [whole]
    node = structure.node_data()
    if node is None or node[0] not in (tuple, list):
        return [whole]
    spans, start = [], 0
    for element in structure.children():
        stop = start + element.num_leaves
        spans.append((element, start, leaves[start:stop]))
        start = stop
    return spans


def _matching(
    argnum: int,
    arguments: Arguments,
    spans: Sequence[tuple[PyTreeDef, int, Sequence[PyTree]]],
    taken: set[int],
) -> int | None:
    """Return the output element with the structure, shapes and dtypes of an argument."""
    members, (tree, _) = arguments.members(argnum), arguments.treedef[argnum]
    if not any(arguments.dynamic[member] for member in members):
        return None
    for number, (other, _, leaves) in enumerate(spans):
        if number in taken or other != tree:
            continue
        pairs = zip(members, leaves, strict=True)
        if all(
            not arguments.dynamic[member]
            or (
                tuple(np.shape(arguments.leaves[member])) == tuple(leaf.shape)
                and abstract(arguments.leaves[member]).dtype == leaf.dtype
            )
            for member, leaf in pairs
        ):
            return number
    return None


def _is_key(leaf: PyTree) -> bool:
    aval = abstract(leaf)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return aval.dtype == np.uint32 and tuple(aval.shape) in ((2,), (4,))
