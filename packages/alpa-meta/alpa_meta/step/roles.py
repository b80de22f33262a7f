"""What each input of a step is: state that the step replaces, a part of the batch, or a constant.

An argument is state if the result, or an element of it, has its structure, shapes and dtypes; of
several such arguments or elements, those that are fewest operations apart belong together. Of the
rest, arrays with dims are the batch, except random keys; arguments named as the batch are. If
some of these arguments have one first dim, the same for all of them, those whose arrays differ in
theirs are constants: the weights of a teacher, a frozen model, a reference policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,
    is_drop,
    is_plain,
    open_jaxpr,
)
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.step.arguments import Arguments, abstract
from alpa_meta.step.leaves import Leaf
from alpa_meta.types import PyTree

Span = tuple[PyTreeDef, int, Sequence[PyTree]]
"""A part of the result: its structure, its first leaf, its leaves."""


def input_roles(
    closed: ClosedJaxpr,
    arguments: Arguments,
    result: tuple[PyTreeDef, Sequence[PyTree]],
    array_results: Sequence[bool],
    batch_argnums: tuple[int, ...] | None,
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return the role of each input array and, per output array, the input it replaces.

    `closed` is the step's program. `result` is the structure of its result and the leaves, with
    shapes and dtypes for arrays, which classes of users need not take (jmp's do not);
    `array_results` marks the arrays.
    """
    spans = _elements(*result, arguments)
    number_of_leaf, count = {}, 0
    for leaf_number, is_array in enumerate(array_results):
        if is_array:
            number_of_leaf[leaf_number] = count
            count += 1
    aliases: list[int | None] = [None] * count
    roles = ["constant"] * sum(arguments.dynamic)
    given: dict[int, list[int]] = {}
    dynamic_number = np.cumsum(arguments.dynamic) - 1

    def operations(argnum: int, number: int) -> float:
        """Return how many operations an element of the result is from an argument, at its largest
        array: counters and what is frozen tell less."""
        members, jaxpr = arguments.members(argnum), open_jaxpr(closed)
        arrays = [k for k, member in enumerate(members) if arguments.dynamic[member]]
        largest = max(arrays, key=lambda k: np.size(arguments.leaves[members[k]]))
        source = jaxpr.invars[dynamic_number[members[largest]]]
        leaf = number_of_leaf[spans[number][1] + largest]
        return _operations(jaxpr, source, jaxpr.outvars[leaf])

    unnamed = [n for n in dict.fromkeys(arguments.argnums) if n not in (batch_argnums or ())]
    state = _matched(arguments, unnamed, spans, operations)
    for argnum in dict.fromkeys(arguments.argnums):
        members = arguments.members(argnum)
        named = batch_argnums is not None and argnum in batch_argnums
        if argnum in state:
            _, start, _ = spans[state[argnum]]
            for offset, member in enumerate(members):
                if arguments.dynamic[member]:
                    roles[dynamic_number[member]] = "state"
                    aliases[number_of_leaf[start + offset]] = int(dynamic_number[member])
        elif batch_argnums is None or named:
            given[argnum] = [
                member
                for member in members
                if arguments.dynamic[member]
                and np.ndim(arguments.leaves[member])
                and (named or not is_key(arguments.leaves[member]))
            ]
    for argnum in given if batch_argnums is not None else _of_examples(arguments, given):
        for member in given[argnum]:
            roles[dynamic_number[member]] = "batch"
    return tuple(roles), tuple(aliases)


def _of_examples(arguments: Arguments, given: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the arguments that hold the batch, of {argument: its leaves with dims}."""
    sizes = {
        argnum: {np.shape(arguments.leaves[member])[0] for member in members}
        for argnum, members in given.items()
    }
    alike = {argnum: of.copy().pop() for argnum, of in sizes.items() if len(of) == 1}
    return list(alike if len(set(alike.values())) == 1 else given)


def _elements(structure: PyTreeDef, leaves: Sequence[PyTree], arguments: Arguments) -> list[Span]:
    """Return each part of the result that may be new state: the
    whole result if it is one argument's, else its elements.
    """
    whole = (structure, 0, leaves)
    for argnum in dict.fromkeys(arguments.argnums):
        if _fits(argnum, arguments, whole):
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


def _matched(
    arguments: Arguments,
    argnums: Sequence[int],
    spans: Sequence[Span],
    operations: Callable[[int, int], float],
) -> dict[int, int]:
    """Return {argument: element of the result that is its new state}; `operations` of both says how
    far apart they are, which is asked where one has several to choose from.
    """
    pairs = [
        (argnum, number)
        for argnum in argnums
        for number, span in enumerate(spans)
        if _fits(argnum, arguments, span)
    ]
    of_argument = Counter(argnum for argnum, _ in pairs)
    of_element = Counter(number for _, number in pairs)
    apart = {
        (argnum, number): operations(argnum, number)
        if of_argument[argnum] > 1 or of_element[number] > 1
        else 0.0
        for argnum, number in pairs
    }
    found: dict[int, int] = {}
    for argnum, number in sorted(pairs, key=lambda pair: (apart[pair], pair)):
        if argnum not in found and number not in found.values():
            found[argnum] = number
    return found


def _operations(jaxpr: Jaxpr, start: Var, stop: Atom) -> float:
    """Return the number of operations on the shortest way from an input to a result."""
    reached: dict[Atom, int] = {start: 0}
    for eqn in jaxpr.eqns:
        read = [
            reached[atom]
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom in reached
        ]
        if read:
            reached.update((var, min(read) + 1) for var in eqn.outvars if not is_drop(var))
    return math.inf if isinstance(stop, Literal) else reached.get(stop, math.inf)


def _fits(argnum: int, arguments: Arguments, span: Span) -> bool:
    """Return whether a part of the result has the structure, shapes and dtypes of an argument."""
    members, (tree, _) = arguments.members(argnum), arguments.treedef[argnum]
    other, _, leaves = span
    if other != tree or not any(arguments.dynamic[member] for member in members):
        return False
    return all(
        not arguments.dynamic[member]
        or (
            tuple(np.shape(arguments.leaves[member])) == tuple(leaf.shape)
            and abstract(arguments.leaves[member]).dtype == leaf.dtype
        )
        for member, leaf in zip(members, leaves, strict=True)
    )


def is_key(leaf: PyTree) -> bool:
    """Return whether an array is a key of random numbers."""
    aval = abstract(leaf)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return aval.dtype == np.uint32 and tuple(aval.shape) in ((2,), (4,))


def moments(program: FlatProgram, inputs: Sequence[Leaf]) -> frozenset[Var]:
    """Return the state arrays, numbers apart, that only the update reads."""
    jaxpr = open_jaxpr(program.closed)
    read = {
        atom
        for eqn, phase in zip(jaxpr.eqns, program.phases, strict=True)
        if phase != "update"
        for atom in eqn.invars
        if isinstance(atom, Var)
    }
    return frozenset(
        var
        for var, leaf in zip(jaxpr.invars, inputs, strict=False)
        if leaf.role == "state" and leaf.aval.shape and is_plain(var) and var not in read
    )
