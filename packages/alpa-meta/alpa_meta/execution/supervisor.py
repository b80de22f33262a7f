"""Steps on Ray that survive their workers: new workers, a checkpoint, and the steps since.

The supervisor keeps the batches of the steps behind the two newest checkpoints that are whole. When
workers fail it has new ones started, restores the newest on them, or the one before it if that is
damaged, and does the steps since again.
The arrays that the user's handles stand for are then what they were, bit for bit under the same
plan, and the step that failed is done again.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import jax
import numpy as np
from attrs import define, evolve, field, frozen

from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.restoring import read_checkpoint
from alpa_meta.checkpoints.saving import Saving
from alpa_meta.errors import WorkersReplaced
from alpa_meta.execution.piecewise import PiecewiseArray
from alpa_meta.identity import Identity
from alpa_meta.step.arguments import is_array
from alpa_meta.step.program import Step
from alpa_meta.step.pure_call import flat_objects
from alpa_meta.types import PyTree
from mesh_runtime import RemoteArray, StepError, WorkerError

_POLL_SECONDS = 0.02
ATTEMPTS = 3
"""How often in a row workers are replaced for one step: what fails that often fails always, as a
batch that no stage has the memory for or a node that kills what it is given."""


class Supervised(Protocol):
    """What runs the steps, and can do so on new workers."""

    def execute(self, key: Hashable, leaves: Sequence[PyTree]) -> list[PyTree]:
        """Return the leaves of a step's result."""

    def prepare(self) -> None:
        """Have what is needed to start new workers soon."""

    def restart(self) -> None:
        """Start new workers, and plan anew if there is no room for as many."""

    def templates(self, key: Hashable) -> list[PyTree]:
        """Return, for each leaf of a step's arguments, a handle laid out as it is read, of an array
        that is not there; a shape for what no worker reads."""

    def step_of(self, key: Hashable) -> Step:
        """Return the step that calls of a key are of."""


@frozen(eq=False)
class _Call:
    """A step that was done: which, the positions of its state, and what else it was given."""

    key: Hashable
    held: tuple[int, ...]
    given: dict[int, PyTree]

    def leaves(self, state: Sequence[PyTree]) -> list[PyTree]:
        """Return the leaves of the call with a state."""
        found = dict(zip(self.held, state, strict=True)) | self.given
        return [found[k] for k in range(len(found))]


@frozen(eq=False)
class _Source:
    """What made a state, and makes it again: an initialiser or a checkpoint.

    `made` are the leaves that it made, `numbers` those that are a step's, in their order.
    """

    make: Callable[[], PyTree]
    name: str
    made: tuple[PyTree, ...] = ()
    numbers: tuple[int, ...] = ()

    def of(self, state: Sequence[PyTree]) -> _Source | None:
        """Return what makes the leaves of `state`; None if they are others."""
        places = {Identity(leaf): number for number, leaf in enumerate(self.made)}
        leaves = [Identity(leaf) for leaf in state]
        if not all(leaf in places for leaf in leaves):
            return None
        return evolve(self, made=(), numbers=tuple(places[leaf] for leaf in leaves))

    def again(self) -> list[PyTree]:
        """Return the leaves, made anew."""
        made = _leaves(self.make())
        return [made[number] for number in self.numbers]


@frozen(eq=False)
class _Mark:
    """A state to go on from: that before call `start` of the log.

    It is in a checkpoint, of which `tree` has the structure with the number of each leaf, or
    `source` made it, or `leaves` are its arrays on the host.
    """

    start: int
    saving: Saving | None = None
    tree: PyTree = None
    leaves: tuple[PyTree, ...] = ()
    source: _Source | None = None

    @property
    def name(self) -> str:
        """Where the run goes on from."""
        if self.saving is not None:
            return str(self.saving.wait())
        return "the first state" if self.source is None else self.source.name

    def is_whole(self) -> bool:
        """Return whether it can be restored, as far as can be told without reading it."""
        return self.saving is None or (self.saving.done() and self.failure() is None)

    def await_saving(self) -> None:
        """Wait until it is saved, or has failed to be."""
        while self.saving is not None and not self.saving.done():
            time.sleep(_POLL_SECONDS)

    def failure(self) -> CheckpointError | None:
        """Return why it could not be saved, None if it was or still is being saved."""
        try:
            if self.saving is not None and self.saving.done():
                self.saving.wait()
        except CheckpointError as error:
            return error
        return None

    def restored(self, templates: Sequence[PyTree]) -> list[PyTree]:
        """Return the leaves of the state, laid out as `templates`."""
        if self.source is not None:
            return self.source.again()
        if self.saving is None:
            return list(self.leaves)
        like = jax.tree.map(lambda number: templates[number], self.tree)
        found = read_checkpoint(self.saving.wait()).restore(like)
        leaves: list[PyTree] = list(templates)
        for number, leaf in zip(jax.tree.leaves(self.tree), jax.tree.leaves(found), strict=True):
            leaves[number] = leaf
        return leaves


@define
class Supervisor:
    """Has the steps of one `ParallelStep` done again when its workers fail."""

    runs: Supervised
    num_recoveries: int = field(default=0, init=False)
    _latest: _Call | None = field(default=None, init=False)
    _state: list[PyTree] = field(factory=list, init=False)
    _log: list[_Call] = field(factory=list, init=False)
    _marks: list[_Mark] = field(factory=list, init=False)
    _source: _Source | None = field(default=None, init=False)
    _prepared: bool = field(default=False, init=False)

    def run(self, key: Hashable, leaves: Sequence[PyTree]) -> list[PyTree]:
        """Return the leaves of a step's result, having replaced workers that failed."""
        call = _call(self.runs.step_of(key), key, leaves)
        state = [leaves[k] for k in call.held]
        if not self._continues(state):
            self._begin(call, state)
        for attempt in range(ATTEMPTS + 1):
            try:
                self._check_open()
                results = self._done(call, self._state)
                break
            except StepError as error:
                if attempt == ATTEMPTS or not self.can_recover():
                    raise
                self.recover(error)
                if not isinstance(error, WorkerError):
                    raise  # of the program: it would fail again; the state is as it was
        self._state, self._latest = self._after(call, self._state, results), call
        self._log.append(call)
        self._forget()
        if not self._prepared:  # behind the first step, which it would delay
            self.runs.prepare()
            self._prepared = True
        return results

    def note_source(self, state: PyTree, make: Callable[[], PyTree], name: str) -> None:
        """Note what made a state: where steps begin with it, `make()` gives it again."""
        self._source = _Source(make, name, tuple(_leaves(state)))

    def note(self, saving: Saving, state: PyTree) -> None:
        """Note that a state is being saved: if it is that after the last step, steps can go on from
        there."""
        numbers: dict[Identity, list[int]] = {}
        for k, leaf in enumerate(self._state):
            numbers.setdefault(Identity(leaf), []).append(k)
        leaves: list[PyTree]
        structure: PyTree
        leaves, structure = jax.tree.flatten(state)
        known = [numbers.get(Identity(leaf)) for leaf in leaves]
        found = [places.pop(0) if places else -1 for places in known]
        if sorted(found) == list(range(len(self._state))):
            tree = structure.unflatten(found)
            self._marks.append(_Mark(len(self._log), saving, tree))

    def latest(self) -> tuple[Step, list[PyTree], tuple[int, ...]]:
        """Return the latest step, the leaves of its next call with its state, and the positions of
        the state."""
        call = self._latest
        assert call is not None
        return self.runs.step_of(call.key), call.leaves(self._state), call.held

    def wait(self) -> None:
        """Wait for the checkpoints under way."""
        for mark in self._marks:
            mark.await_saving()
        self._forget()

    def can_recover(self) -> bool:
        """Return whether there is a state to go on from."""
        self._forget()
        return any(mark.is_whole() for mark in self._marks)

    def recover(self, error: Exception) -> None:
        """Make the state after the last step anew on new workers, and the handles stand for it."""
        for attempt in range(ATTEMPTS):
            self._forget()
            self._warn(f"{error}; its workers are replaced, and")
            try:
                self._prepared = False
                self.runs.restart()
                self.num_recoveries += 1
                assert self._latest is not None
                templates = self.runs.templates(self._latest.key)
                state, calls = self._restored([templates[k] for k in self._latest.held])
                for call in calls:
                    state = self._after(call, state, self._done(call, state))
                self._state = [_again(*pair) for pair in zip(self._state, state, strict=True)]
                return
            except WorkerError as again:
                if attempt == ATTEMPTS - 1:
                    raise
                error = again

    def _newest(self) -> _Mark:
        return next(mark for mark in reversed(self._marks) if mark.is_whole())

    def _warn(self, why: str) -> None:
        mark = self._newest()
        warnings.warn(
            f"{why} the run goes on from {mark.name} with {len(self._log) - mark.start} steps done "
            "again",
            WorkersReplaced,
            stacklevel=3,
        )

    def _restored(self, templates: Sequence[PyTree]) -> tuple[list[PyTree], list[_Call]]:
        """Return the state of the newest mark that can be read, and the calls since."""
        while True:
            mark = self._newest()
            try:
                return mark.restored(templates), self._log[mark.start :]
            except CheckpointError as error:
                self._marks.remove(mark)
                if not any(one.is_whole() for one in self._marks):
                    raise
                self._warn(f"{error};")

    def _continues(self, state: Sequence[PyTree]) -> bool:
        """Return whether a step is given the state that the last one returned."""
        return len(state) == len(self._state) > 0 and all(
            given is own for given, own in zip(state, self._state, strict=True)
        )

    def _begin(self, call: _Call, state: list[PyTree]) -> None:
        """Forget what was before: a step is given another state."""
        self._latest, self._state, self._log, self._marks = call, state, [], []
        source = None if self._source is None else self._source.of(state)
        self._source = None
        if source is not None:
            self._marks = [_Mark(0, source=source)]
        elif not any(isinstance(leaf, (RemoteArray, PiecewiseArray)) for leaf in state):
            self._marks = [_Mark(0, leaves=tuple(map(_copied, state)))]

    def _forget(self) -> None:
        """Forget what could not be saved, saying so, and what is before the last two marks that are
        whole: the newest may turn out to be damaged when it is read."""
        for mark in list(self._marks):
            if (failure := mark.failure()) is not None:
                warnings.warn(f"no checkpoint was saved: {failure}", RuntimeWarning, stacklevel=2)
                self._marks.remove(mark)
        whole = [k for k, mark in enumerate(self._marks) if mark.is_whole()]
        if not whole:
            return
        first = whole[-2:][0]
        start = self._marks[first].start
        self._log = self._log[start:]
        self._marks = [evolve(mark, start=mark.start - start) for mark in self._marks[first:]]

    def _check_open(self) -> None:
        """Raise the reason for which the workers were closed since the last step, if they were."""
        for leaf in self._state:
            for one in leaf.pieces if isinstance(leaf, PiecewiseArray) else (leaf,):
                reason = getattr(one.owner, "closed", "") if isinstance(one, RemoteArray) else ""
                if reason:
                    raise WorkerError(reason)

    def _done(self, call: _Call, state: Sequence[PyTree]) -> list[PyTree]:
        return self.runs.execute(call.key, call.leaves(state))

    def _after(
        self, call: _Call, state: Sequence[PyTree], results: Sequence[PyTree]
    ) -> list[PyTree]:
        """Return the state after a call."""
        step, after = self.runs.step_of(call.key), dict(zip(call.held, state, strict=True))
        for result, alias in zip(results, step.aliases, strict=True):
            if alias is not None:
                after[alias] = result
        return list(after.values())


def _call(step: Step, key: Hashable, leaves: Sequence[PyTree]) -> _Call:
    """Return a call of a step; of its state are also constants that live on workers."""
    held = tuple(
        k
        for k, (leaf, value) in enumerate(zip(step.leaves, leaves, strict=True))
        if leaf.role == "state" or isinstance(value, (RemoteArray, PiecewiseArray))
    )
    given = {k: _copied(leaf) for k, leaf in enumerate(leaves) if k not in held}
    return _Call(key, held, given)


def _leaves(state: PyTree) -> list[PyTree]:
    """Return the arrays of a state in the order in which a step has them."""
    return [leaf for leaf in flat_objects(state)[0] if is_array(leaf)]


def _copied(leaf: PyTree) -> PyTree:
    """Return an array that stays as it is: a loader may fill its own anew."""
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _again(handle: PyTree, made: PyTree) -> PyTree:
    """Return an array under the handle that the user has of it, where that can stand for it."""
    if isinstance(handle, RemoteArray) and isinstance(made, RemoteArray):
        handle.buffer, handle.key_impl = made.buffer, made.key_impl
        return handle
    if isinstance(handle, PiecewiseArray) and isinstance(made, PiecewiseArray):
        handle.pieces, handle.bounds = made.pieces, made.bounds
        return handle
    return made
