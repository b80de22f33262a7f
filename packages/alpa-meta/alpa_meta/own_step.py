"""A user's program on the command line: `--step module:function`.

The function takes no arguments and returns (step, state, batch): a training step, its state and one
batch (or an iterator of batches), as arrays or, where nothing is run, as shapes. The state may be a
function without arguments that makes it, which is then called where the plan wants the state, and
the batches may be `HostBatches`. A tuple of states or of batch arguments stands for several
arguments of the step. A `CorpusModel` is taken as well.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Protocol

import jax
from attrs import frozen
from jax.tree_util import PyTreeDef

from alpa_meta.corpus import NAMES, SIZES, CorpusModel, build, published
from alpa_meta.errors import PlanError
from alpa_meta.execution.piecewise import copied
from alpa_meta.execution.state import Unborn
from alpa_meta.published_models import PUBLISHED
from alpa_meta.step.arguments import num_arguments
from alpa_meta.step.pure_call import OneDevice, flat_objects
from alpa_meta.types import Function, PyTree
from mesh_runtime import HostBatches


class Runnable(Protocol):
    """A training step of (state, batch), and what it can be called with."""

    @property
    def name(self) -> str: ...

    @property
    def train_step(self) -> Function[PyTree]: ...

    @property
    def state(self) -> PyTree:
        """The state, or its shapes."""

    @property
    def batch(self) -> PyTree:
        """The batch, or its shapes."""

    @property
    def exact(self) -> bool:
        """Whether microbatches must give the results of the whole batch (`Options.exact`)."""

    def arguments(self) -> tuple[PyTree, PyTree]:
        """Return a state and a batch of arrays that the step may overwrite."""


@frozen(kw_only=True)
class OwnStep:
    """A user's step as one of (state, batch), with what it is called with."""

    name: str
    train_step: Function[PyTree]
    state: PyTree
    batch: PyTree
    later: Iterator[PyTree] | None = None  # batches after the first, where there are several
    make: Callable[[], PyTree] | None = None  # makes the state; `state` is then its shapes
    exact: bool = True

    def arguments(self) -> tuple[PyTree, PyTree]:
        """Return a state and a batch that a step may overwrite."""
        if self.make is not None:
            return OneDevice(self.make)(), self.batch
        for part in (self.state, self.batch):
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat_objects(part)[0]):
                raise PlanError(
                    f"--step {self.name} returned shapes, which can be planned but not run; "
                    "return arrays"
                )
        return _copied(self.state), _copied(self.batch)


def load_step(place: str) -> Runnable:
    """Return the program that "module:function" stands for; modules here come first."""
    made = _function(place)()
    if isinstance(made, CorpusModel):
        return made
    if type(made) is not tuple or len(made) != 3 or not callable(made[0]):
        raise PlanError(
            f"--step {place} must return (step, state, batch), a training step and what it is "
            f"called with, or an alpa_meta.corpus.CorpusModel, got {_described(made)}"
        )
    step, state, batch = made
    make = None
    if inspect.isroutine(state) or isinstance(state, functools.partial):
        make, state = state, Unborn(state, ()).shapes()
    if isinstance(batch, HostBatches):
        batches = batch
        batch = (batches[number] for number in itertools.count())
    later = batch if isinstance(batch, Iterator) else None
    if later is not None and (batch := next(later, later)) is later:
        raise PlanError(f"--step {place} returned an iterator without a batch; yield at least one")
    two = _of_two(step, state, batch)
    return OwnStep(name=place, train_step=two, state=state, batch=batch, later=later, make=make)


def named_model(text: str, option: str = "", **changed: object) -> CorpusModel:
    """Return the published model of a name, or the corpus model that "name" or "name:size" names.

    `option` is what was given it; `changed` are fields of a published model's shape.
    """
    place = f"{option} {text}: " if option else ""
    if text in PUBLISHED:
        try:
            return published(text, **changed)
        except ValueError as error:
            raise PlanError(f"{place}{error}") from None
    if changed:
        raise PlanError(
            f"{place}only published models take other sizes (got {', '.join(changed)}); a model of "
            f"the corpus has {', '.join(SIZES)}: name:size"
        )
    name, _, size = text.partition(":")
    size = size or SIZES[0]
    if name not in NAMES or size not in SIZES:
        what = f"no model {name!r}" if name not in NAMES else f"no size {size!r} of {name}"
        known = ", ".join(NAMES if name not in NAMES else SIZES)
        near = difflib.get_close_matches(name, PUBLISHED, n=3) if name not in NAMES else []
        hint = f"; among the published models are {', '.join(near)}" if near else ""
        raise PlanError(f"{place}the corpus has {what}; it has {known}{hint}")
    return build(name, size)


def _function(place: str) -> Callable[[], PyTree]:
    module_name, _, name = place.partition(":")
    if not name or os.sep in module_name or not all(module_name.split(".")):
        raise PlanError(f"--step must be module:function, got {place!r}")
    if module_name.endswith(".py"):
        raise PlanError(
            f"--step must be module:function, got {place!r}, a file; write "
            f"{module_name.removesuffix('.py')}:{name}"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(import_module(module_name), name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise PlanError(
            f"--step {place} must be module:function: there is no module {error.name!r} here or "
            "among what is installed"
        ) from None
    except AttributeError:
        raise PlanError(
            f"--step {place} must be module:function: module {module_name!r} has no {name!r}"
        ) from None
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise PlanError(
            f"--step {place} must name a function without arguments that returns "
            f"(step, state, batch), got {_described(function)}"
        ) from None
    return function  # type: ignore[no-any-return]


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def _of_two(step: Function[PyTree], state: PyTree, batch: PyTree) -> Function[PyTree]:
    """Return `step` as a function of two arguments, however many it takes."""
    taken = num_arguments(step)
    if taken is None or 2 in taken and type(state) is not tuple:
        return step
    states, batches = (one if type(one) is tuple else (one,) for one in (state, batch))
    if 2 in taken and len(states) + len(batches) not in taken:
        return step
    if len(states) + len(batches) not in taken:
        raise PlanError(
            f"the step takes {taken.stop - 1} arguments, but --step returned a state and a batch "
            f"for {len(states) + len(batches)}; give several states or batch arguments as tuples"
        )

    def of_two(state: PyTree, batch: PyTree) -> PyTree:
        states = state if isinstance(state, tuple) else (state,)
        batches = batch if type(batch) is tuple else (batch,)
        result = step(*states, *batches)
        new = result[: len(states)] if type(result) is tuple else ()
        if type(state) is tuple and _alike(new, state):
            return new, *result[len(states) :]
        return result

    return of_two


def _copied(tree: PyTree) -> PyTree:
    leaves, rebuild = flat_objects(tree)
    return rebuild(list(map(copied, leaves)))


def _alike(one: PyTree, other: PyTree) -> bool:
    structures: list[PyTreeDef] = [jax.tree.structure(one), jax.tree.structure(other)]
    return bool(structures[0] == structures[1])


def after_step(state: PyTree, result: PyTree) -> tuple[PyTree, PyTree]:
    """Return the state after a step and what else it returned.

    A step that returns no new state has updated the given one in place.
    """
    if _alike(result, state):
        return result, ()
    if type(result) is tuple and result and _alike(result[0], state):
        return result[0], result[1] if len(result) == 2 else result[1:]
    return state, result
