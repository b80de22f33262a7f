"""The user's step on the processes of a Ray cluster: equal to one process, bit for bit."""

import json
import os
from pathlib import Path

os.environ.setdefault("RAY_worker_niceness", "0")  # not behind other tests
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # other programs' memory is not ours
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers, which none uses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attrs import evolve
from equal_trees import assert_equal, words
from ray_nodes import started

import alpa_meta as alpa
from alpa_interchange import load
from alpa_interchange.plan import ParallelPlan
from alpa_meta.cli import run
from cost_model import cluster as named_cluster
from mesh_runtime import Part, RayWorkers, StoredArray, StoreError, save_remote

pytest.importorskip("ray", reason="needs the extra alpa-meta[ray]")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]

ADAM = optax.adam(1e-2)
BATCH = jax.ShapeDtypeStruct((8, 16), np.float32)


def make(key):
    weights = jax.random.normal(key, (4, 16, 16)) / 4
    return {"weights": weights, "key": key, "scale": jnp.ones(16)}, ADAM.init(weights)


def step(state, x):
    (held, moments), (key, noise) = state, jax.random.split(state[0]["key"])

    def loss_of(weights):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean((h - x * held["scale"]) ** 2), jnp.max(h, axis=-1)

    (loss, peaks), gradients = jax.value_and_grad(loss_of, has_aux=True)(held["weights"])
    updates, moments = ADAM.update(gradients, moments)
    weights = optax.apply_updates(held["weights"], updates)
    drawn = jax.random.uniform(noise)
    results = {"loss": loss, "drawn": drawn, "peaks": peaks}  # one for each example
    return ({**held, "weights": weights, "key": key}, moments), results


def batch(number):
    return np.random.default_rng(number).normal(size=BATCH.shape).astype(np.float32)


def rows_of(number, start, stop):
    return batch(number)[start:stop]


@pytest.fixture(scope="module")
def nodes():
    """Make a cluster of two nodes, each its own set of Ray processes."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    started(lambda: cluster.add_node(num_cpus=2))
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_a_cluster_that_is_not_there_is_named():
    program = alpa.parallelize(
        step, cluster="host:2", num_stages=1, runtime=alpa.RayOptions(address="127.0.0.1:9")
    )
    with pytest.raises(alpa.PlanError, match="no Ray cluster answers at 127.0.0.1:9"):
        program(make(jax.random.key(0)), batch(0))
    with pytest.raises(alpa.PlanError, match="no Ray cluster answers at 127.0.0.1:9"):
        program.init(make, jax.random.key(0), batch=batch(0))
    assert "not planned yet" in repr(program)  # planning may take minutes
    plan = program.plan_for(make(jax.random.key(0)), batch(0))  # which needs no cluster
    assert plan.num_stages == 1


def halve(x, batch):
    value, slope = jax.value_and_grad(lambda x: jnp.mean((x * batch) ** 2))(x)
    return x - slope / 2, value


def test_another_cluster_than_the_one_this_process_is_connected_to_is_refused(nodes):
    import ray

    connected = ray.get_runtime_context().gcs_address
    host, _, port = connected.rpartition(":")

    def run(address):
        runtime = alpa.RayOptions(address=address, step_timeout=120.0)
        far = alpa.parallelize(halve, cluster="host:1", num_stages=1, runtime=runtime)
        far(jnp.ones(4), jnp.ones((8, 1)))

    for other in ("127.0.0.1:9", f"{host}:{int(port) + 1}", f"192.0.2.254:{port}"):
        with pytest.raises(alpa.PlanError, match=f"at {connected}, not to {other}"):
            run(other)
    run(connected)
    run(f"localhost:{port}")


def test_workers_have_64_bit_types_where_this_process_does(nodes):
    with jax.enable_x64(True):
        args = jnp.linspace(0.0, 1.0, 4), jnp.linspace(1.0, 2.0, 8)[:, None]
        near = alpa.parallelize(halve, cluster="host:1", num_stages=1)
        plan = near.plan_for(*args)
        far = alpa.parallelize(halve, plan=plan, runtime=alpa.RayOptions(step_timeout=120.0))
        found = far.gather(far(*args))
        assert_equal(found, near(*args))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float64)}


@pytest.mark.fault("batch of a wrong shape or dtype", "refused before the step; the state is kept")
def test_two_stages_train_on_ray_as_in_one_process_with_their_state_on_the_workers(
    nodes, tmp_path, monkeypatch
):
    near = alpa.parallelize(step, cluster="host:4", num_stages=2, num_microbatches=2)
    key = jax.random.key(3)
    expected = near.init(make, key, batch=BATCH)
    options = alpa.RayOptions(
        step_timeout=120.0,
        environment={"PYTHONPATH": os.path.dirname(__file__)},  # of what reads batches there
    )
    far = alpa.parallelize(step, plan=near.plan, runtime=options)
    state = far.init(make, key, batch=BATCH)
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, (alpa.RemoteArray, alpa.PiecewiseArray)) for leaf in leaves)
    assert state[0]["key"].dtype == key.dtype
    batches = alpa.HostBatches(rows_of, BATCH)
    for number in range(3):
        old = state
        expected, wanted = near(expected, batches[number] if number == 1 else batch(number))
        state, found = far(state, batches[number] if number else batch(number))
        assert_equal(far.gather(found), wanted)
    assert_equal(far.gather(state), near.gather(expected))

    # what a step overwrote, and a batch that the plan is not for, are refused; the state is kept
    with pytest.raises(alpa.PlanError, match="was given away to an earlier step"):
        far(old, batch(3))
    with pytest.raises(RuntimeError, match=r"gone\): it was given away to step 3 as"):
        np.asarray(old[1][0].mu)
    with pytest.raises(alpa.PlanError, match="x must have shape .8, 16., as planned, got .8, 17."):
        far.executable([*jax.tree.leaves(state), np.ones((8, 17), np.float32)])
    with pytest.raises(alpa.PlanError, match="make it with runtime='in-process'"):
        far.audit(state, BATCH)

    # every worker writes and reads its own shards; the state goes on here and in one process
    saving = alpa.save(tmp_path, state, step=3)
    again, wanted = near(expected, batch(3))
    moved, found = far(state, batch(3))
    assert_equal(far.gather(found), wanted)
    path = saving.wait()
    assert {one.name for one in path.glob("ocdbt*")} >= {
        "ocdbt.process_mesh_0_host_0",
        "ocdbt.process_mesh_1_host_0",
    }
    fetched = []
    monkeypatch.setattr(RayWorkers, "fetch", lambda *given: fetched.append(given))
    state = alpa.restore(path, like=moved)
    monkeypatch.undo()
    assert not fetched
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, (alpa.RemoteArray, alpa.PiecewiseArray)) for leaf in leaves)
    expected = alpa.restore(path, like=again)
    assert_equal(far.gather(state), near.gather(expected))

    # the state goes on by the way of the host as well, and the forward pass shares the workers
    assert_equal(far.evaluate(state, batch(3))[1], near.evaluate(expected, batch(3))[1])
    state = far.place(far.gather(state))
    assert_equal(far(state, batch(3))[1], near(expected, batch(3))[1])
    far.close()
    with pytest.raises(RuntimeError, match="cannot be used any more: it was closed"):
        np.asarray(state[0]["scale"])


@pytest.mark.fault(
    "NaN or infinity in a microbatch", "[`on_nan`](#stop-or-skip-at-nan): found before the update"
)
def test_a_spoilt_microbatch_is_found_before_the_update_on_ray(nodes):
    near = alpa.parallelize(step, cluster="host:2", num_stages=2, num_microbatches=2)
    far = alpa.parallelize(
        step,
        plan=near.plan_for(make(jax.random.key(0)), BATCH),
        runtime=alpa.RayOptions(step_timeout=120.0),
        on_nan="raise",
    )
    state, _ = far(make(jax.random.key(0)), batch(0))
    before, bad = far.gather(state), batch(1)
    bad[-1] = np.inf
    with pytest.raises(alpa.NonFiniteError, match="step 2: microbatch 1 gave NaN") as raised:
        far(state, bad)
    state, _ = raised.value.result
    assert_equal(far.gather(state), before)
    far(state, batch(2))
    far.close()


def test_a_mesh_over_two_nodes_trains_as_one_process(nodes, tmp_path):
    host = named_cluster("host:4").host_groups[0]
    cluster = evolve(
        named_cluster("host:4"),
        name="two hosts",
        host_groups=(evolve(host, num_hosts=2, devices_per_host=2),),
    )
    options = alpa.RayOptions(placement="STRICT_SPREAD", step_timeout=120.0)
    near = alpa.parallelize(step, cluster=cluster, num_stages=1)
    near.plan_for(make(jax.random.key(0)), BATCH)
    far = alpa.parallelize(step, plan=near.plan, runtime=options)
    expected, state = make(jax.random.key(0)), make(jax.random.key(0))
    for number in range(2):
        expected, wanted = near(expected, batch(number))
        state, found = far(state, batch(number))
    # gloo adds across processes in its own order: float32 rounding, nothing more
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(words(a), words(b), rtol=1e-5, atol=1e-6),
        far.gather((state, found)),
        near.gather((expected, wanted)),
    )

    # two processes write one array; what cannot be written is said, and nobody is ended
    path = alpa.save(tmp_path, state, step=2).wait()
    assert len(list(path.glob("ocdbt.process_mesh_0_host_*"))) == 2
    found = alpa.restore(tmp_path, like=state)
    assert_equal(far.gather(found), far.gather(state))
    assert_equal(far.gather(state), alpa.restore(tmp_path, like=near.gather(expected)))
    array = state[0]["weights"]
    stored = StoredArray("x", array.shape, str(array.dtype), array.shape)
    part = Part(stored, (0,) * array.ndim, array.shape)
    with pytest.raises(StoreError, match="mesh 0 host .: .*cannot be written"):
        save_remote(Path("/proc/nowhere"), [(part, array)], 1 << 20)()
    far(state, batch(2))
    far.close()


def test_the_command_trains_on_ray_what_it_trains_in_one_process(nodes, tmp_path):
    sizes = "--layers 2 --hidden 16 --heads 2 --context 32 --batch 16 --steps 3".split()
    near, far = tmp_path / "near", tmp_path / "far"
    asked = "--ray --microbatches 2 --schedule 1f1b --compare 2".split()
    assert run(["train", *sizes, *asked, "--out", str(far)]) == 0
    plan = ["--plan", str(far / "plan.json")]
    assert run(["train", *sizes, *plan, "--compare", "0", "--out", str(near)]) == 0
    losses = [
        [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (near, far)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert load(far / "plan.json", ParallelPlan).num_stages == 2
    assert (far / "checkpoint" / "step-00000003").is_dir()


def moved_step(weights, tokens):
    """A step whose tokens move along their dim: shifts, pads, and an associative scan."""

    def loss_of(weights):
        x = weights["embed"][tokens]
        before = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))[:, :-2]
        x = x + jnp.tanh(jnp.concatenate([before[:, :1], before[:, :-1]], 1) @ weights["shift"])
        decay = jax.nn.sigmoid(x @ weights["decay"])
        _, mixed = jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=1
        )
        return jnp.mean((mixed @ weights["out"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def test_token_slices_whose_tokens_move_run_on_ray_as_in_one_process(nodes):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embed": (11, 8), "shift": (8, 8), "decay": (8, 8), "out": (8, 8)}
    weights = {
        name: jax.random.normal(key, shape) / 3
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    tokens = np.arange(12).reshape(1, 12) * 7 % 11
    near = alpa.parallelize(
        moved_step,
        cluster="host:2",
        num_stages=2,
        num_microbatches=1,
        schedule="1f1b",
        token_slices=(5, 3, 4),
        donate=False,
    )
    expected = near.gather(near(weights, tokens))
    whole, loss = jax.jit(moved_step)(weights, tokens)
    np.testing.assert_allclose(expected[1], loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), expected[0], whole)
    far = alpa.parallelize(
        moved_step, plan=near.plan, runtime=alpa.RayOptions(step_timeout=120.0), donate=False
    )
    assert_equal(far.gather(far(weights, tokens)), expected)
    far.close()
