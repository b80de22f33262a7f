"""Programs given on the command line as module:function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.corpus import build
from alpa_meta.errors import PlanError
from alpa_meta.own_step import after_step, load_step, named_model

SOURCE = """
import jax, jax.numpy as jnp

def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    return weights - gradient, {"loss": loss}

def several(weights, moment, x, y):
    return weights + 1, moment + 2, (x * y).sum()

def program():
    return step, jnp.eye(4), jnp.ones((8, 4))

def shapes():
    return step, jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")

def tuples():
    return several, (jnp.ones(2), jnp.zeros(3)), (jnp.ones(4), jnp.ones(4))

def of_many():
    return several, jnp.ones(2), jnp.ones(4)

def number():
    return 3

def with_argument(x):
    return x

pi = 3.14
"""


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    (tmp_path / "own_programs.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_function_that_returns_step_state_and_batch_is_enough():
    program = load_step("own_programs:program")
    state, batch = program.arguments()
    assert state is not program.state
    state, metrics = after_step(state, program.train_step(state, batch))
    assert state.shape == (4, 4) and float(metrics["loss"]) == 1.0


def test_tuples_are_several_arguments():
    program = load_step("own_programs:tuples")
    state, total = after_step(program.state, program.train_step(program.state, program.batch))
    assert np.array_equal(state[0], [2, 2]) and np.array_equal(state[1], [2, 2, 2])
    assert float(total) == 4.0


def test_a_step_that_returns_no_state_has_updated_it_in_place():
    state = {"w": jnp.ones(2)}
    assert after_step(state, 3.0) == (state, 3.0)
    assert after_step(state, state) == (state, ())


def test_shapes_can_be_planned_but_not_run():
    program = load_step("own_programs:shapes")
    assert isinstance(program.state, jax.ShapeDtypeStruct)
    with pytest.raises(PlanError, match="can be planned but not run"):
        program.arguments()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("own_programs", "must be module:function, got 'own_programs'"),
        ("./own_programs:program", "must be module:function, got './own_programs:program'"),
        ("own_programs.py:program", "a file; write own_programs:program"),
        ("no_programs:program", "there is no module 'no_programs'"),
        ("own_programs:absent", "has no 'absent'"),
        ("own_programs:pi", "a function without arguments .* got float 3.14"),
        ("own_programs:with_argument", "a function without arguments"),
        ("own_programs:number", r"must return \(step, state, batch\), .* got int 3"),
        ("own_programs:of_many", "takes 4 arguments"),
    ],
)
def test_what_is_no_program_is_refused_in_a_sentence(place, message):
    with pytest.raises(PlanError, match=message):
        load_step(place)


def test_corpus_models_go_by_name_and_size():
    assert named_model("convnet").size == "tiny"
    assert named_model("convnet:small").name == build("convnet", "small").name
    with pytest.raises(PlanError, match="no size 'huge' of llama; it has tiny"):
        named_model("llama:huge")
    with pytest.raises(PlanError, match="--model foo: the corpus has no model 'foo'"):
        named_model("foo", "--model")
