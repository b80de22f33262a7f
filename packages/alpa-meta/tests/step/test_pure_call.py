"""Steps over flax nnx objects and equinox modules run as nnx.jit and eqx.filter_jit run them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa

pytest.importorskip("flax")
pytest.importorskip("equinox")

import equinox as eqx
from flax import nnx

WHOLE: dict[str, Any] = {"cluster": "host:8", "num_stages": 1, "num_microbatches": 1}
X = jax.random.normal(jax.random.key(1), (16, 8))
BATCH = {"x": X, "y": jnp.roll(X, 1, axis=1)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def make_objects() -> tuple[Any, Any]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)


def train(model, optimizer, batch):
    def loss_of(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def words(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(words(left), words(right), rtol=2e-5, atol=2e-6)


@pytest.mark.sample("wrap", "stages")
@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit], ids=["plain", "nnx.jit"])
@pytest.mark.parametrize("stages", [1, 2])
def test_nnx_objects_are_updated_in_place(wrap, stages):
    expected, got = make_objects(), make_objects()
    plain = nnx.jit(train)
    step = alpa.parallelize(wrap(train), **{**WHOLE, "num_stages": stages})
    kernel = got[0].up.kernel
    for _ in range(3):
        assert float(step(*got, BATCH)) == pytest.approx(float(plain(*expected, BATCH)), rel=1e-5)
    assert_same(nnx.state(expected), nnx.state(got))
    assert got[0].up.kernel is kernel
    assert len(step._cache) == 1
    assert "model['up']['kernel'].value" in {one.path for one in step.plan.program.inputs}


def test_nnx_objects_are_born_sharded_and_audited():
    step = alpa.parallelize(train, **WHOLE, preset="zero3")
    objects = step.init(make_objects, batch=BATCH)
    assert isinstance(objects[0], Net)
    assert not objects[0].up.kernel[...].sharding.is_fully_replicated
    assert step.audit(*objects, BATCH).ok
    expected = float(nnx.jit(train)(*make_objects(), BATCH))
    model, optimizer = step.place(*make_objects())
    assert float(step(model, optimizer, batch=BATCH)) == pytest.approx(expected, 1e-5)


def test_what_a_step_changes_in_the_structure_of_objects_is_seen_outside():
    def step(model, x):
        model.train()
        model.seen = nnx.Variable(x.sum())
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))
        return {"loss": loss, "model": model, "other": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}

    model, _ = make_objects()
    model.eval()
    result = alpa.parallelize(step, **WHOLE)(model, X)
    assert result["model"] is model
    assert not model.drop.deterministic
    assert float(model.seen[...]) == pytest.approx(float(X.sum()), rel=1e-4)
    assert result["other"].kernel.shape == (2, 2)


def test_an_object_shared_by_two_arguments_is_one():
    def step(model, again, x):
        assert model.up is again["up"]
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        again["up"].bias[...] -= gradients["up"]["bias"][...]
        return loss

    model, _ = make_objects()
    alpa.parallelize(step, **WHOLE)(model, {"up": model.up}, X)
    assert float(jnp.abs(model.up.bias[...]).max()) > 0


def test_a_step_that_removes_a_variable_is_refused():
    def step(model, x):
        del model.up.bias
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(model.up.kernel[...]).sum()

    with pytest.raises(alpa.PlanError, match=r"removes the variable up\.bias"):
        alpa.parallelize(step, **WHOLE)(make_objects()[0], X)


class Module(eqx.Module):
    layers: list[eqx.nn.Linear]
    depth: int
    scale: float
    activation: Callable[[jax.Array], jax.Array]
    training: bool

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(8, 8, key=one) for one in jax.random.split(key, 3)]
        self.depth, self.scale, self.activation, self.training = 3, 0.5, jnp.tanh, True

    def __call__(self, x):
        for layer in self.layers[: self.depth]:
            x = self.activation(layer(x)) * self.scale
        return x if self.training else 0 * x


ADAM = optax.adam(1e-2)


def make_module() -> tuple[Any, Any]:
    module = Module(jax.random.key(0))
    return module, ADAM.init(eqx.filter(module, eqx.is_inexact_array))


def structure(tree):
    return jax.tree.structure(tree)


def descend(module, moments, x):
    def loss_of(module):
        return jnp.mean((jax.vmap(module)(x) - x) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(module)
    updates, moments = ADAM.update(gradients, moments)
    return eqx.apply_updates(module, updates), moments, loss


@pytest.mark.parametrize("wrap", [lambda step: step, eqx.filter_jit, functools.partial])
def test_numbers_and_functions_in_equinox_modules_are_static(wrap):
    expected, got = make_module(), make_module()
    plain, step = eqx.filter_jit(descend), alpa.parallelize(wrap(descend), **WHOLE)
    for _ in range(2):
        *expected, loss = plain(*expected, X)
        *got, found = step(*got, X)
        assert float(found) == pytest.approx(float(loss), rel=1e-5)
    assert structure(expected) == structure(got)
    assert (got[0].depth, got[0].scale, got[0].training) == (3, 0.5, True)
    assert_same(eqx.filter(expected, eqx.is_array), eqx.filter(got, eqx.is_array))
    assert len(step._cache) == len(step._direct) == 1


def test_another_static_number_is_another_plan():
    module, moments = make_module()
    step = alpa.parallelize(descend, **WHOLE, donate=False)
    deep = step(module, moments, X)[2]
    shallow = eqx.tree_at(lambda module: module.depth, module, 1)
    found = step(shallow, moments, X)[2]
    assert float(found) == pytest.approx(float(descend(shallow, moments, X)[2]), rel=1e-5)
    assert float(found) != float(deep)
    assert len(step._cache) == 2


def test_all_numbers_of_a_step_that_equinox_wrapped_are_static():
    @eqx.filter_jit
    def step(weights, x, power):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** power))(weights)
        return weights - 0.1 * gradient * (1 if power > 2 else 0), loss

    weights, _ = alpa.parallelize(step, **WHOLE)(jnp.eye(8), X, 2)
    assert np.array_equal(weights, np.eye(8))
