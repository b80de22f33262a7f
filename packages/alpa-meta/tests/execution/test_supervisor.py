"""When workers fail, the steps since the last state that is kept are done again."""

import jax
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.execution.supervisor import ATTEMPTS, Supervisor
from alpa_meta.step.program import Step
from mesh_runtime import StepError, WorkerError


def total(state, x):
    return state + x.sum(), x.max()


STATE, X = np.zeros((), np.float32), np.ones(3, np.float32)


class Runs:
    """Runs steps here; `faults` are errors to raise, by the number of the execution."""

    def __init__(self, faults):
        self.step, self.faults = Step(total, (STATE, X)), dict(faults)
        self.executed, self.restarts, self.prepared = 0, 0, []

    def execute(self, key, leaves):
        self.executed += 1
        if self.executed in self.faults:
            raise self.faults[self.executed]
        return list(total(*leaves))

    def prepare(self):
        self.prepared.append(self.executed)

    def restart(self):
        self.restarts += 1

    def templates(self, key):
        return [leaf.aval for leaf in self.step.leaves]

    def step_of(self, key):
        return self.step


def train(supervisor, count, state=STATE):
    x = X.copy()  # one buffer that is filled anew, as some loaders do
    for number in range(count):
        x[:] = number
        state, _ = supervisor.run("key", [state, x])
    return state


def test_steps_are_done_again_from_the_first_state_and_with_the_batches_they_had():
    runs = Runs({4: WorkerError("a worker died")})
    with pytest.warns(alpa.WorkersReplaced, match="a worker died; .*first state with 3 steps"):
        assert train(Supervisor(runs), 6) == sum(3 * number for number in range(6))
    assert runs.restarts == 1 and runs.executed == 6 + 1 + 3
    assert runs.prepared == [1, 4 + 3 + 1]  # others stand by behind the first step, and once more


def test_steps_are_done_again_from_the_newest_checkpoint_that_is_whole(tmp_path):
    runs = Runs({8: WorkerError("a worker died")})
    supervisor = Supervisor(runs)
    state = STATE
    for number in range(8):
        state, _ = supervisor.run("key", [state, np.full(3, number, np.float32)])
        if number in (1, 4):
            supervisor.note(alpa.save(tmp_path, {"sum": state}, step=number + 1), {"sum": state})
            supervisor.wait()
        if number == 5:
            supervisor.note(alpa.save(tmp_path, state, step=9), "another state")  # is no mark
        if number == 6:
            with pytest.warns(alpa.WorkersReplaced, match="step-00000005 with 2 steps done again"):
                state, _ = supervisor.run("key", [state, np.full(3, 7, np.float32)])
            break
    assert state == sum(3 * number for number in range(8))
    assert runs.executed == 7 + 1 + 2 + 1


def test_a_state_that_was_made_elsewhere_is_made_there_again():
    runs = Runs({3: WorkerError("a worker died")})
    supervisor, made = Supervisor(runs), []

    def make():
        made.append(alpa.PiecewiseArray([np.ones(1, np.float32)], [0, 1]))
        return {"sum": made[-1]}

    state = make()
    supervisor.note_source(state, make, "step 7 of a run")
    with pytest.warns(alpa.WorkersReplaced, match="goes on from step 7 of a run with 2 steps"):
        train(supervisor, 4, state["sum"])
    assert len(made) == 2 and runs.executed == 4 + 1 + 2


def test_an_error_of_the_program_is_raised_with_the_state_as_it_was():
    runs = Runs({3: StepError("out of memory in stage 1")})
    supervisor = Supervisor(runs)
    state = train(supervisor, 2)
    with pytest.warns(alpa.WorkersReplaced), pytest.raises(StepError, match="out of memory"):
        supervisor.run("key", [state, X])
    state, _ = supervisor.run("key", [supervisor.latest()[1][0], X])
    assert state == 3 + 3


def test_what_always_fails_is_given_up():
    runs = Runs({number: WorkerError("dies") for number in range(3, 99, 3)})
    supervisor = Supervisor(runs)
    state = train(supervisor, 2)
    with pytest.warns(alpa.WorkersReplaced), pytest.raises(WorkerError, match="dies"):
        supervisor.run("key", [state, X])
    assert runs.restarts == ATTEMPTS


def test_without_a_state_to_go_on_from_the_error_is_that_of_the_worker():
    class Handle(alpa.PiecewiseArray):
        pass

    runs = Runs({1: WorkerError("died")})
    held = Handle([np.zeros((1,), np.float32)], [0, 1])
    with pytest.raises(WorkerError, match="died"):
        Supervisor(runs).run("key", [held, X])
    assert runs.restarts == 0


def test_checkpoints_without_workers_are_refused(tmp_path):
    with pytest.raises(alpa.PlanError, match="Options.checkpoints .* give runtime='ray'"):
        alpa.parallelize(total, checkpoints=tmp_path)
    with pytest.raises(alpa.PlanError, match="no folder to resume from"):
        alpa.parallelize(total, cluster="host:1").resume(jax.numpy.zeros(()))
