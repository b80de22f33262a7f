"""Faults put into real processes and nodes of a Ray cluster, and what becomes of the run."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # not behind other tests
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # other programs' memory is not ours
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers, which none uses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attrs import evolve
from equal_trees import assert_equal
from ray_nodes import started

import alpa_meta as alpa
from alpa_meta.cli import run
from alpa_meta.trainer.monitor import Monitor
from cost_model import cluster as named_cluster
from mesh_runtime import StepError

pytest.importorskip("ray", reason="needs the extra alpa-meta[ray]")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]

ADAM = optax.adam(1e-2)
BATCH = jax.ShapeDtypeStruct((8, 16), np.float32)
STEPS = 8
HOST = named_cluster("host:2").host_groups[0]
CLUSTER = evolve(
    named_cluster("host:2"),
    name="two hosts",
    host_groups=(evolve(HOST, num_hosts=2, devices_per_host=1),),
)


def make(key):
    weights = jax.random.normal(key, (4, 16, 16)) / 4
    return {"weights": weights, "key": key, "moments": ADAM.init(weights)}


def step(state, x):
    key, noise = jax.random.split(state["key"])

    def loss_of(weights):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean((h - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = ADAM.update(gradients, state["moments"])
    weights = optax.apply_updates(state["weights"], updates)
    drawn = jax.random.uniform(noise)
    return {"weights": weights, "key": key, "moments": moments}, {"loss": loss, "drawn": drawn}


def batch(number):
    return np.random.default_rng(number).normal(size=BATCH.shape).astype(np.float32)


def processes(parallel):
    (workers,) = parallel._pool._workers.values()
    return workers.process_ids


def descendants(pid):
    """Return all processes that a process has started, and that those have."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and alive(int(entry.name)):
            with suppress(OSError), open(f"/proc/{entry.name}/stat") as stat:
                parents[int(entry.name)] = int(stat.read().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def nodes():
    """Make a cluster of a node for the driver and two for one process each."""
    import ray
    from ray.cluster_utils import Cluster

    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 3,
    }
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    cluster: Any = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    cluster.working = [started(lambda: cluster.add_node(num_cpus=2)) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def plan():
    planner = alpa.parallelize(step, cluster=CLUSTER, num_stages=2, num_microbatches=2)
    return planner.plan_for(make(jax.random.key(0)), BATCH)


@pytest.fixture(scope="module")
def undisturbed(plan):
    """Return the state after `STEPS` steps in one process, and their losses."""
    near = alpa.parallelize(step, plan=plan)
    state, losses = make(jax.random.key(0)), []
    for number in range(STEPS):
        state, found = near(state, batch(number))
        losses.append(float(found["loss"]))
    return near.gather(state), losses


def surviving(tmp_path, program=step, **settings):
    options = alpa.RayOptions(
        cpus_per_actor=2.0,
        step_timeout=120.0,
        replace_timeout=settings.pop("room", 60.0),
        environment=settings.pop("environment", {}),
    )
    return alpa.parallelize(
        program,
        runtime=options,
        checkpoints=tmp_path / "saved",
        checkpoint_every=settings.pop("every", 3),
        **settings,
    )


@pytest.mark.fault(
    "worker killed in a step", "replaced, restored, its steps done again; parameters bit-equal"
)
@pytest.mark.fault(
    "worker stopped (SIGSTOP), or its host hangs",
    "found within 10 s and named alone, then as above",
)
def test_killed_and_stopped_workers_are_replaced_and_the_run_is_as_undisturbed(
    nodes, plan, undisturbed, tmp_path, record_property
):
    far = surviving(tmp_path, plan=plan)
    state, losses = far.init(make, jax.random.key(0), batch=BATCH), []
    state, found = far(state, batch(0))
    far.evaluate(state, batch(0))
    losses.append(float(found["loss"]))
    faults = {
        1: ("mesh 0 host 0", signal.SIGKILL, "the first state with 1 steps"),
        5: ("mesh 1 host 0", signal.SIGSTOP, ".*step-00000003 with 2 steps"),
    }
    names = {
        signal.SIGKILL: "worker killed in a step",
        signal.SIGSTOP: "worker stopped (SIGSTOP), or its host hangs",
    }
    for number in range(1, STEPS):
        if number in faults:
            name, fault, source = faults[number]
            threading.Timer(0.003, os.kill, (processes(far)[name], fault)).start()
            begun = time.monotonic()
            with pytest.warns(alpa.WorkersReplaced, match=f"{name}.*goes on from {source}"):
                # the step may be done before the signal comes
                state, found = far(state, batch(number))
                if far.supervisor.num_recoveries <= list(faults).index(number):
                    far.gather(state)
            record_property(names[fault], time.monotonic() - begun)
        else:
            state, found = far(state, batch(number))
        if number == 4:
            far.supervisor.wait()  # from here on it is the checkpoint of step 3 that is restored
        losses.append(float(found["loss"]))
        if number == 6:
            evaluated = far.evaluate(state, batch(number))[1]
    assert far.supervisor.num_recoveries == 2
    assert np.isfinite(float(evaluated["loss"]))
    expected, expected_losses = undisturbed
    assert losses == expected_losses
    assert_equal(far.gather(state), expected)
    far.close()
    assert alpa.read_checkpoint(tmp_path / "saved").step == 6


STALLING = """
import os
from resharding.socket_link import SocketLink

post = SocketLink.post

def post_unless_told(self, *given, **when):
    try:
        os.unlink(os.environ["STALLS"] + self.name)  # one offer is kept back, and no other
    except FileNotFoundError:
        post(self, *given, **when)

SocketLink.post = post_unless_told
"""


@pytest.mark.fault(
    "transfer stalled: a peer that is alive but does not send",
    "found within 10 s, named with the tensor, the instruction and both ends, then as above",
)
def test_a_peer_that_answers_but_does_not_send_is_named_and_the_run_goes_on(
    nodes, plan, undisturbed, tmp_path, record_property
):
    (tmp_path / "sitecustomize.py").write_text(STALLING)
    told = f"{tmp_path}/stalls "
    far = surviving(tmp_path, plan=plan, environment={"PYTHONPATH": str(tmp_path), "STALLS": told})
    state, losses = far.init(make, jax.random.key(0), batch=BATCH), []
    named = (
        r"the transfer of step \d+: .* from mesh 0 to mesh 1, message \d+ is stalled: "
        r"mesh 1 host 0 is at mesh 1, instruction \d+ \(receive .*of .* from mesh 0\), and "
        r"nothing has come for \d\.\d s from mesh 0 host 0, which has it ready"
    )
    for number in range(STEPS):
        if number == 4:
            far.supervisor.wait()
            (tmp_path / "stalls mesh 0 host 0").touch()
            begun = time.monotonic()
            with pytest.warns(alpa.WorkersReplaced, match=f"{named}.*step-00000003 with 1 steps"):
                state, found = far(state, batch(number))
            seconds = time.monotonic() - begun
            record_property("transfer stalled: a peer that is alive but does not send", seconds)
        else:
            state, found = far(state, batch(number))
        losses.append(float(found["loss"]))
    assert far.supervisor.num_recoveries == 1
    expected, expected_losses = undisturbed
    assert losses == expected_losses
    assert_equal(far.gather(state), expected)
    far.close()


@pytest.mark.fault(
    "node lost, another comes", "replaced, restored, its steps done again; parameters bit-equal"
)
@pytest.mark.fault("node lost, none comes", "planned anew for a host fewer, and goes on")
def test_a_lost_node_is_replaced_or_the_step_is_planned_anew_for_those_left(
    nodes, plan, undisturbed, tmp_path, record_property
):
    far = surviving(tmp_path, plan=plan, room=5.0)
    state = make(jax.random.key(0))
    for number in range(4):
        state, _ = far(state, batch(number))
    far.supervisor.wait()
    nodes.remove_node(nodes.working.pop(0), allow_graceful=False)
    nodes.working.append(started(lambda: nodes.add_node(num_cpus=2)))
    begun = time.monotonic()
    with pytest.warns(alpa.WorkersReplaced, match="step-00000003 with 1 steps done again"):
        state, _ = far(state, batch(4))
    record_property("node lost, another comes", time.monotonic() - begun)
    for number in range(5, STEPS):
        state, _ = far(state, batch(number))
    assert far.plan.stage_plan.num_meshes == 2
    assert_equal(far.gather(state), undisturbed[0])
    far.close()

    far = surviving(tmp_path / "fewer", plan=plan, room=5.0)
    state, losses = make(jax.random.key(0)), []
    for number in range(STEPS):
        if number == 4:
            far.supervisor.wait()
            there = processes(far).values()
            nodes.remove_node(nodes.working.pop(), allow_graceful=False)
            while all(map(alive, there)):  # workers end once they see that their node is gone
                time.sleep(0.05)
            begun = time.monotonic()
            with pytest.warns(alpa.WorkersReplaced, match="planned anew for 1 hosts"):
                state, found = far(state, batch(number))
            record_property("node lost, none comes", time.monotonic() - begun)
        else:
            state, found = far(state, batch(number))
        losses.append(float(found["loss"]))
    assert [group.num_hosts for group in far.plan.cluster.host_groups] == [1]
    np.testing.assert_allclose(losses, undisturbed[1], rtol=1e-5)
    far.close()
    nodes.working.append(started(lambda: nodes.add_node(num_cpus=2)))


@pytest.mark.fault(
    "full disk, folder that cannot be written",
    "a warning while training, refused at the start",
)
@pytest.mark.fault(
    "checkpoint truncated, changed, hostile", "passed over for the one before, in bounded memory"
)
def test_a_run_goes_on_when_a_checkpoint_cannot_be_written_and_when_the_newest_is_damaged(
    nodes, plan, undisturbed, tmp_path
):
    far, saved = surviving(tmp_path, plan=plan, every=2), tmp_path / "saved"
    state = far.init(make, jax.random.key(0), batch=BATCH)
    losses: list[float] = []

    def go_on(stop):
        nonlocal state
        for number in range(len(losses), stop):
            state, found = far(state, batch(number))
            losses.append(float(found["loss"]))
        far.supervisor.wait()

    go_on(2)
    away = saved.rename(tmp_path / "away")
    saved.write_text("no folder")  # as a disk that refuses to write
    with pytest.warns(RuntimeWarning, match="no checkpoint was saved: .*saved"):
        go_on(4)
    saved.unlink()
    away.rename(saved)
    go_on(6)
    (newest,) = saved.glob("step-*6")
    for path in newest.rglob("ocdbt*/d/*"):
        os.truncate(path, path.stat().st_size // 2)
    os.kill(processes(far)["mesh 1 host 0"], signal.SIGKILL)
    with pytest.warns(alpa.WorkersReplaced) as said:
        go_on(8)
    texts = [str(one.message) for one in said if one.category is alpa.WorkersReplaced]
    assert re.search("step-00000006 with 0 steps done again", texts[0])
    assert re.search("step-00000006.*goes on from .*step-00000002 with 4 steps", texts[1])
    assert losses == undisturbed[1]
    assert_equal(far.gather(state), undisturbed[0])
    far.close()


@pytest.fixture(scope="module")
def left_behind():
    """Take processes whose driver was killed; all must end, while other tests run."""
    processes: list[int] = []
    yield processes
    latest = time.monotonic() + 300  # our workers are gone in 3 s, agents of Ray within 65
    while any(map(alive, processes)) and time.monotonic() < latest:
        time.sleep(0.1)
    assert not any(map(alive, processes))


PROGRAM = """
import jax, numpy as np
from test_ray_survival import batch, make, step

def program():
    return step, make(jax.random.key(0)), map(batch, range(10**6))
"""


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.fault(
    "calling process killed",
    "its processes end; `--resume` (or `train_step.resume`) goes on; parameters bit-equal",
)
def test_a_run_whose_driver_is_killed_resumes_as_if_it_had_not_been(
    nodes, left_behind, tmp_path, monkeypatch
):
    (tmp_path / "killed_run.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    fixed = ["--compare", "0", "--checkpoint-every", "5"]
    begin = ["--step", "killed_run:program", "--cluster", "host:2", "--microbatches", "2"]
    paths = os.pathsep.join([str(tmp_path), os.path.dirname(__file__)])
    driver = subprocess.Popen(
        [sys.executable, "-c", "from alpa_meta.cli import main; main()", "train", "--ray"]
        + [*begin, *fixed, "--steps", "1000000", "--out", "run"],
        env={**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not list((tmp_path / "run" / "checkpoint").glob("step-*")):
            assert driver.poll() is None
            time.sleep(0.05)
        started = descendants(driver.pid)
        left_behind.extend(started)
    finally:
        driver.kill()
        driver.wait()
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    done = alpa.read_checkpoint("run/checkpoint").step
    assert run(["train", "--resume", "run", "--ray", *fixed, "--steps", str(done + 7)]) == 0
    plan = ["--plan", "run/plan.json"]
    near = ["train", *begin[:4], *plan, *fixed, "--steps", str(done + 7), "--out", "near"]
    assert run(near) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "near")
    found, expected = (alpa.restore(f"{one}/checkpoint") for one in ("run", "near"))
    assert_equal(found, expected)
    assert len(started) >= 4  # Ray's own, and two workers


def heavy(weights, x):
    def loss_of(weights):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean((h - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradients, loss


def slowed(pid, ended):
    """Let a process run a third of the time."""
    while not ended.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


@pytest.mark.fault("slow worker", "`alpa train` names its mesh and its share of the step")
def test_a_slow_worker_is_named_with_its_share_of_the_step(nodes, tmp_path):
    weights = np.random.default_rng(0).normal(size=(8, 128, 128)).astype(np.float32) / 12
    x = np.random.default_rng(1).normal(size=(256, 128)).astype(np.float32)
    far = alpa.parallelize(
        heavy,
        cluster=CLUSTER,
        num_stages=2,
        num_microbatches=2,
        runtime=alpa.RayOptions(cpus_per_actor=2.0, step_timeout=120.0),
        trace="ready",
    )
    said: list[str] = []
    ended = threading.Event()
    monitor = Monitor(far, tmp_path / "newest.prom", said.append)
    state, _ = far(weights, x)
    pid = processes(far)["mesh 1 host 0"]
    thread = threading.Thread(target=slowed, args=(pid, ended))
    try:
        latest = time.monotonic() + 300
        for number in itertools.count():
            if number == 20:
                said.clear()
                thread.start()
            state, _ = far(state, x)
            monitor.look()
            monitor.note(number, 0.1, {})
            named = [one for one in said if "mesh 1" in one]  # a busy machine slows the other, too
            if number > 20 and named:
                break
            assert time.monotonic() < latest  # steps in which all else is slow, too, do not count
    finally:
        ended.set()
        thread.join()
    assert re.fullmatch(
        r"warning: step \d+: mesh 1 takes .* times as long as before and computes \d+% .*", named[0]
    )
    far.close()


def squares(weights, x):
    """Sort all products of two elements of what the second layer gives. (The gradient of a sort is
    a scatter, of which XLA compiles none as large.)"""

    def loss_of(weights):
        h = jnp.tanh(jnp.tanh(x * weights[0]) * weights[1]).reshape(-1)
        least = jnp.sort(jnp.outer(h, h), axis=0)[0]
        return jnp.mean(h**2) + jnp.mean(jax.lax.stop_gradient(least))

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


@pytest.mark.fault(
    "out of memory in one stage",
    "the run of the stage is named; the state is as it was before the step",
)
def test_a_stage_that_finds_no_memory_is_named_and_the_state_is_as_it_was(nodes, tmp_path):
    weights = [jnp.float32(0.5), jnp.float32(2.0)]
    small, large = (np.linspace(-1, 1, n, dtype=np.float32)[None] for n in (64, 1 << 19))
    fixed = {"num_stages": 2, "num_microbatches": 1, "memory": 1e16}  # the plan thinks that it fits
    far = surviving(tmp_path, squares, cluster=CLUSTER, **fixed)
    state, _ = far(weights, small)
    state, loss = far(state, small)
    with (
        pytest.warns(alpa.WorkersReplaced, match="the first state with 2 steps"),
        pytest.raises(StepError, match=r"mesh \d, .*run '.*\d'.* failed: .*Out of memory"),
    ):
        far(state, large)
    state, loss = far(state, small)
    near, expected = jax.jit(squares), weights
    for _ in range(3):
        expected, wanted = near(expected, small)
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    np.testing.assert_allclose(far.gather(state), expected, rtol=1e-5)
    far.close()
