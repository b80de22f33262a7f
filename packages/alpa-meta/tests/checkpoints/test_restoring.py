"""What `restore` makes of a checkpoint: the same state in any layout, or one clear refusal."""

import json
import shutil
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa


def grid(*shape, start=0):
    devices = jax.devices()[start : start + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("a", "b")[: len(shape)])


def words(leaf):
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def structure(tree):
    return jax.tree.structure(tree)


def assert_same(found, expected):
    assert structure(found) == structure(expected)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype and words(got).tobytes() == words(wanted).tobytes()


def saved(folder, state, step=1, **settings):
    return alpa.save(folder, state, step=step, settings=settings).wait()


def test_arrays_of_two_meshes_are_restored_on_others_and_on_the_host(tmp_path):
    first, second = grid(2, 2), grid(4, start=4)
    weights = jnp.arange(96.0).reshape(12, 8)
    state = {
        "w": jax.device_put(weights, NamedSharding(first, P("a", "b"))),
        "half": jax.device_put(weights.astype(jnp.bfloat16), NamedSharding(second, P(None, "a"))),
        "eight": weights.astype(jnp.float8_e4m3fn),
        "four": (weights % 7).astype(jnp.int4),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1), 4), NamedSharding(second, P("a"))
        ),
        "rbg": jax.random.key(2, impl="rbg"),
    }
    saved(tmp_path, state)
    assert_same(alpa.restore(tmp_path, like=state), state)
    third = NamedSharding(grid(3), P("a"))
    wanted = {
        "w": third,
        "half": NamedSharding(grid(8), P(None, "a")),
        "eight": third,
        "four": SingleDeviceSharding(jax.devices()[5]),
        "keys": NamedSharding(grid(2), P("a")),
        "rbg": SingleDeviceSharding(jax.devices()[3]),
    }
    like = jax.tree.map(
        lambda one, to: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=to), state, wanted
    )
    found = alpa.restore(tmp_path, like=like)
    assert_same(found, state)
    assert all(found[name].sharding.is_equivalent_to(wanted[name], 1) for name in ("rbg", "four"))
    assert found["w"].sharding == third
    host = alpa.restore(tmp_path, like=jax.eval_shape(lambda: state))
    assert_same(host, state)
    assert type(host["w"]) is np.ndarray


def test_pieces_are_restored_as_pieces_cut_elsewhere_and_as_one_array(tmp_path):
    layers = jnp.arange(48.0).reshape(8, 6)

    def cut(*bounds):
        places = [NamedSharding(grid(2, start=2 * k), P(None, "a")) for k in range(4)]
        pieces = [
            jax.device_put(layers[a:b], to)
            for a, b, to in zip(bounds, bounds[1:], places, strict=False)
        ]
        return alpa.PiecewiseArray(pieces, bounds)

    saved(tmp_path, {"layers": cut(0, 3, 8)})
    found = alpa.restore(tmp_path, like={"layers": cut(0, 1, 6, 8)})["layers"]
    assert found.bounds == (0, 1, 6, 8)
    assert found.pieces[1].sharding == NamedSharding(grid(2, start=2), P(None, "a"))
    np.testing.assert_array_equal(found, layers)
    whole = alpa.restore(tmp_path, like={"layers": jax.ShapeDtypeStruct((8, 6), jnp.float32)})
    np.testing.assert_array_equal(whole["layers"], layers)


def test_leaves_that_are_no_arrays_come_back_and_functions_are_the_program_s(tmp_path):
    def made(scale):
        return {
            "w": jnp.full(3, scale, jnp.bfloat16),
            "rate": scale,
            "steps": int(scale),
            "huge": 10**30 * int(scale),
            "on": scale > 1,
            "turn": complex(0, scale),
            "nan": float("nan"),
            "name": f"é\n{scale}",
            "none": None,
            "empty": {},
            "pair": (),
            "none of it": jnp.zeros((0, 4)),
            "act": jnp.tanh,
        }

    saved(tmp_path, made(2.0))
    found = alpa.restore(tmp_path, like=made(1.0))
    wanted = made(2.0)
    assert found.keys() == wanted.keys() and found["act"] is jnp.tanh and np.isnan(found["nan"])
    for name in ("rate", "steps", "huge", "on", "turn", "name", "none", "empty", "pair"):
        assert found[name] == wanted[name] and type(found[name]) is type(wanted[name])
    assert found["none of it"].shape == (0, 4)
    assert found["w"].tolist() == [2.0] * 3


def test_without_a_program_the_state_is_nested_dicts_and_lists(tmp_path):
    state: dict[str, Any] = {"a": (None, {"b": jnp.ones(2)}, [jnp.zeros(1), 3]), "none": None}
    state["moments"] = optax.adam(1.0).init(jnp.ones(2))
    state["key"] = jax.random.key(3)
    saved(tmp_path, state)
    found = alpa.restore(tmp_path)
    assert found.keys() == {"a", "moments", "key"}
    assert found["a"][0] is None and found["a"][1]["b"].tolist() == [1, 1]
    assert found["a"][2][1] == 3 and type(found["a"][2][0]) is np.ndarray
    assert found["moments"][0]["mu"].tolist() == [0, 0]
    assert found["key"] == state["key"]


@pytest.mark.parametrize("state", [{}, (), [{}, None], {"s": "text"}, 3.5, jnp.ones(2)])
def test_trees_with_few_leaves_or_none_come_back(tmp_path, state):
    saved(tmp_path, state)
    found = alpa.restore(tmp_path, like=state)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), found, state))
    alpa.restore(tmp_path)


def test_a_number_that_a_step_made_an_array_becomes_a_number_again(tmp_path):
    saved(tmp_path / "arrays", {"rate": jnp.float32(0.5), "n": jnp.int32(3)})
    found = alpa.restore(tmp_path / "arrays", like={"rate": 1.0, "n": 1})
    assert found == {"rate": 0.5, "n": 3} and type(found["n"]) is int
    saved(tmp_path / "numbers", {"rate": 0.5, "n": 3})
    found = alpa.restore(tmp_path / "numbers", like={"rate": jnp.float32(1), "n": jnp.int32(1)})
    assert found["rate"].dtype == jnp.float32 and int(found["n"]) == 3


def test_a_number_that_a_step_made_another_kind_of_number_keeps_its_value(tmp_path):
    saved(tmp_path, {"rate": jnp.float32(0.5), "phase": 1j, "count": 2.0, "limit": float("inf")})
    found = alpa.restore(tmp_path, like={"rate": 1, "phase": 2, "count": 3, "limit": 4})
    assert found == {"rate": 0.5, "phase": 1j, "count": 2, "limit": float("inf")}
    assert type(found["count"]) is int


def test_nnx_objects_are_made_anew_with_the_arrays(tmp_path):
    first, second = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    saved(tmp_path, first)
    found = alpa.restore(tmp_path, like=second)
    assert isinstance(found, nnx.Linear)
    np.testing.assert_array_equal(found.kernel[...], first.kernel[...])


def test_a_step_goes_on_from_another_plan_s_checkpoint(tmp_path):
    optimiser = optax.adam(1e-2)

    def make(key):
        weights = jax.random.normal(key, (4, 8, 8)) / 3
        return weights, optimiser.init(weights), key

    def step(state, x):
        weights, moments, key = state

        def loss_of(weights):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
            return jnp.mean(h**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = optimiser.update(gradients, moments)
        return (optax.apply_updates(weights, updates), moments, jax.random.split(key)[0]), loss

    batch, key = np.ones((8, 8), np.float32), jax.random.key(0)
    pipeline = alpa.parallelize(step, cluster="host:8", num_stages=2, num_microbatches=2)
    state = pipeline.init(make, key, batch=batch)
    state, _ = pipeline(state, batch)
    saving = alpa.save(tmp_path, state, step=1)
    state, expected = pipeline(state, batch)
    saving.wait()

    def loss_after(other, like):
        return float(other(alpa.restore(tmp_path, like=like), batch)[1])

    assert loss_after(pipeline, pipeline.init(make, key, batch=batch)) == float(expected)
    one = alpa.parallelize(step, cluster="host:4", num_stages=1)
    like = one.init(make, key, batch=batch)
    assert loss_after(one, like) == pytest.approx(float(expected), rel=1e-5)
    assert loss_after(one, one.init(make, key)) == pytest.approx(float(expected), rel=1e-5)
    shapes = jax.eval_shape(make, key)
    assert loss_after(jax.jit(step), shapes) == pytest.approx(float(expected), rel=1e-5)


def test_a_checkpoint_of_another_program_is_refused_leaf_by_leaf(tmp_path):
    state = {"w": jnp.ones((3, 4)), "n": jnp.int32(1), "k": jax.random.key(0), "s": "x"}
    saved(tmp_path, state)
    other = {"w": jnp.ones((3, 5)), "m": jnp.ones(2), "k": jax.random.key(0, impl="rbg"), "s": 1}
    with pytest.raises(alpa.CheckpointError) as caught:
        alpa.restore(tmp_path, like=other)
    message = str(caught.value)
    for line in (
        "5 leaves differ",
        "['w'] is float32[3, 4] in the checkpoint and float32[3, 5] in the program",
        "['m'] is missing",
        "['n'] is not in the program",
        "['k'] is random keys threefry2x32[] in the checkpoint and random keys rbg[] in the",
        "['s'] is a str in the checkpoint and a int in the program",
    ):
        assert line in message


def test_a_step_is_asked_for_or_a_checkpoint_itself(tmp_path):
    for step in (1, 2):
        saved(tmp_path, {"n": step}, step, seed=step)
    assert alpa.restore(tmp_path) == {"n": 2}
    assert alpa.restore(tmp_path, step=1) == {"n": 1}
    assert alpa.restore(tmp_path / "step-00000001") == {"n": 1}
    found = alpa.read_checkpoint(tmp_path)
    assert (found.step, found.settings) == (2, {"seed": 2})
    with pytest.raises(alpa.CheckpointError, match="holds no checkpoint of step 3"):
        alpa.restore(tmp_path, step=3)
    with pytest.raises(alpa.CheckpointError, match="holds no checkpoint"):
        alpa.restore(tmp_path / "nowhere")


def largest(path):
    return max(
        (one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )


def truncate(path):
    file = largest(path)
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = largest(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_step(path):
    manifest = path / "alpa.json"
    document = json.loads(manifest.read_text())
    document["value"]["step"] = 7
    manifest.write_text(json.dumps(document))


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


DAMAGES = {
    "truncated": (truncate, "is damaged: it has .* bytes"),
    "flipped": (flip, "is damaged: its SHA-256"),
    "a file less": (lambda path: largest(path).unlink(), "cannot be read: No such file"),
    "another step": (change_step, "alpa.json: is damaged: it does not have the SHA-256"),
    "no manifest": (lambda path: (path / "alpa.json").unlink(), "alpa.json: cannot be read"),
    "deep": (lambda path: (path / "alpa.json").write_text("[" * 10**5), "nested deeper than"),
    "not text": (lambda path: (path / "alpa.json").write_bytes(b"\xff"), "is damaged"),
    "empty": (empty, "cannot be read"),
}


@pytest.mark.fault(
    "checkpoint truncated, changed, hostile", "passed over for the one before, in bounded memory"
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    for step in (1, 2):
        saved(tmp_path, {"w": jnp.full(4000, step)}, step)
    spoil, reason = DAMAGES[damage]
    spoil(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=f"{reason}.*going back to step-00000001"):
        assert alpa.restore(tmp_path)["w"][0] == 1
    with pytest.raises(alpa.CheckpointError, match=reason):
        alpa.restore(tmp_path, step=2)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(alpa.CheckpointError, match=reason):
        alpa.restore(tmp_path)


def test_stray_names_are_not_looked_at(tmp_path):
    saved(tmp_path, {"n": 1}, 1)
    for name in ("step-bad", "step-", "step-00000009x", "step-9" * 9, "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert alpa.restore(tmp_path) == {"n": 1}


def sealed(path, change):
    """Change a manifest and give it the sum that then belongs to it, as an attacker would."""
    from alpa_interchange import from_json
    from alpa_meta.checkpoints.manifest import CheckpointManifest

    document = json.loads((path / "alpa.json").read_text())
    change(document["value"])
    text = json.dumps(document)
    (path / "alpa.json").write_text(from_json(text, CheckpointManifest).sealed())


@pytest.mark.fault(
    "checkpoint truncated, changed, hostile", "passed over for the one before, in bounded memory"
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["leaves"][0].update(shape=[1 << 40]), "names arrays of .* but its files have"),
        (lambda v: v["leaves"][0].update(shape=[-1, -5000]), "that nothing can hold"),
        (lambda v: v["files"][0].update(path="../../secret"), "names a file outside of it"),
        (lambda v: v["leaves"][0].update(dtype="nothing"), "that nothing can hold"),
        (lambda v: v["leaves"][0].update(keys=["k"] * 10**5), "more than 500 levels deep"),
    ],
)
def test_a_hostile_manifest_is_refused_before_memory_is_taken(tmp_path, change, message):
    path = saved(tmp_path, {"w": jnp.ones(1000)})
    sealed(path, change)
    tracemalloc.start()
    with pytest.raises(alpa.CheckpointError, match=message):
        alpa.restore(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_a_manifest_that_lies_about_an_array_s_shape_is_refused(tmp_path):
    path = saved(tmp_path, {"w": jnp.ones((50, 20))})
    sealed(path, lambda v: v["leaves"][0].update(shape=[10, 20]))
    with pytest.raises(alpa.CheckpointError, match="'w' cannot be read"):
        alpa.restore(tmp_path, like={"w": jnp.ones((10, 20))})


def test_many_small_zeros_are_not_taken_for_a_bomb(tmp_path):
    state = {f"x{k}": np.zeros(250, np.float32) for k in range(200)}
    saved(tmp_path, state)
    assert_same(alpa.restore(tmp_path, like=state), state)
