"""The state of a step on the meshes of its plan: born there, or brought there from the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
from attrs import frozen
from jax.sharding import NamedSharding, PartitionSpec

from alpa_meta.errors import PlanError
from alpa_meta.execution.piecewise import Piece, StateArray, state_arrays
from alpa_meta.step.arguments import is_array, strong
from alpa_meta.step.pure_call import flat_objects
from alpa_meta.types import Function, PyTree

if TYPE_CHECKING:
    from alpa_meta.execution.executable import Executable


_LATER = (
    "made by init() only once the batch is known; call the step first, or pass the batch's shapes: "
    "init(make, ..., batch=...)"
)


@frozen(eq=False)
class Unborn:
    """State that `init` was asked for before the batch's shapes were known; the first step makes
    it."""

    make: Function[PyTree]
    args: tuple[PyTree, ...]

    def __iter__(self) -> Iterator[PyTree]:
        raise PlanError(f"several states are {_LATER}")

    def __getitem__(self, key: object) -> PyTree:
        raise PlanError(f"the state's {key!r} is {_LATER}")

    def __getattr__(self, name: str) -> PyTree:
        raise AttributeError(f"the state's {name!r} is {_LATER}")

    def shapes(self) -> PyTree:
        """Return the state to be with shapes for its arrays; leaves that are no arrays as they
        are."""
        made: list[PyTree] = []

        def arrays_only(*args: PyTree) -> list[PyTree]:
            leaves, rebuild = flat_objects(self.make(*args))
            kept = [None if is_array(leaf) else leaf for leaf in leaves]
            made[:] = [rebuild, kept]
            return [leaf for leaf in leaves if is_array(leaf)]

        shapes = iter(jax.eval_shape(arrays_only, *self.args))
        rebuild, kept = made
        return rebuild([next(shapes) if leaf is None else leaf for leaf in kept])

    def born(self, executable: Executable) -> PyTree:
        """Return the state, each mesh computing only the arrays that live on it."""
        shapes, rebuild = flat_objects(self.shapes())
        leaves = list(shapes)
        arrays = [k for k, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
        wanted = _wanted(
            executable,
            len(arrays),
            "init made a state of {} arrays, but the step has {} state arrays; make() must return "
            "the state argument (a tuple if there are several)",
        )
        members: dict[int, list[tuple[int, Piece]]] = {}
        for k, array in zip(arrays, wanted, strict=True):
            for piece in array.pieces:
                members.setdefault(executable.input_mesh(piece.path), []).append((k, piece))

        def part_on(mesh: int) -> Function[list[jax.Array]]:
            def part(*args: PyTree) -> list[jax.Array]:
                flat, _ = flat_objects(self.make(*args))
                arrays = {k: strong(flat[k], shapes[k].dtype) for k, _ in members[mesh]}
                return [piece.of(arrays[k]) for k, piece in members[mesh]]

            return part

        shardings = {
            mesh: [
                executable.input_sharding(piece.path)
                or NamedSharding(executable.meshes[mesh], PartitionSpec())
                for _, piece in pieces
            ]
            for mesh, pieces in members.items()
        }
        made = executable.init({mesh: part_on(mesh) for mesh in members}, shardings, self.args)
        found = {
            one: value
            for mesh, pieces in members.items()
            for one, value in zip(pieces, made[mesh], strict=True)
        }
        for k, array in zip(arrays, wanted, strict=True):
            leaves[k] = array.united([found[k, piece] for piece in array.pieces])
        return rebuild(leaves)


def placed(executable: Executable, state: PyTree) -> PyTree:
    """Return state with its arrays, from wherever they are, laid out as the plan wants them."""
    leaves, rebuild = flat_objects(state)
    arrays = [k for k, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    wanted = _wanted(
        executable, len(arrays), "place() was given {} arrays, the step has {} state arrays"
    )
    pieces = {
        piece.path: piece.of(leaves[k])
        for k, array in zip(arrays, wanted, strict=True)
        for piece in array.pieces
    }
    found = executable.place(pieces)
    for k, array in zip(arrays, wanted, strict=True):
        leaves[k] = array.united([found[piece.path] for piece in array.pieces])
    return rebuild(leaves)


def laid_out(executable: Executable, state: PyTree) -> PyTree:
    """Return what stands for the arrays of a state, of which shapes are given, laid out as the plan
    wants them (`Executable.templates`): what a checkpoint is restored like. Python numbers stay."""
    leaves, rebuild = flat_objects(state)
    numbers = (bool, int, float, complex)
    given = [
        k for k, leaf in enumerate(leaves) if hasattr(leaf, "dtype") or isinstance(leaf, numbers)
    ]
    wanted = _wanted(
        executable, len(given), "restore() was given {} arrays, the step has {} state arrays"
    )
    found = executable.templates()
    for k, array in zip(given, wanted, strict=True):
        if hasattr(leaves[k], "dtype"):
            leaves[k] = array.united([found[piece.path] for piece in array.pieces])
    return rebuild(leaves)


def templates(executable: Executable) -> dict[str, PyTree]:
    """Return what to restore each array of the state like, by the path of the user's array."""
    found = executable.templates()
    return {
        array.path: array.united([found[piece.path] for piece in array.pieces])
        for array in state_arrays(executable.planned.program, ("state", "constant"))
    }


def _wanted(executable: Executable, count: int, otherwise: str) -> tuple[StateArray, ...]:
    """Return the state arrays of a plan; PlanError says `otherwise` if they are not `count`."""
    wanted = state_arrays(executable.planned.program)
    if len(wanted) != count:
        raise PlanError(otherwise.format(count, len(wanted)))
    return wanted
