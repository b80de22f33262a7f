"""One plan for all processes: what is refused, and a process that is alone.

Several processes are in tests/test_distributed.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.planning.shared_plan import agreed_plan, check_stages, is_distributed


@pytest.fixture(scope="module")
def plan():
    """Return a plan of two stages."""

    def step(weights, x):
        def loss_of(weights):
            return jnp.mean((jnp.tanh(x @ weights["a"]) @ weights["b"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), loss

    shape = jax.ShapeDtypeStruct((8, 8), np.float32)
    parallel = alpa.parallelize(
        step, cluster="host:4", num_stages=2, num_microbatches=2, schedule="1f1b"
    )
    return parallel.plan_for({"a": shape, "b": shape}, shape)


def test_several_stages_are_refused_with_the_way_to_run_them(plan):
    with pytest.raises(alpa.PlanError, match=r"num_stages=2 under jax.distributed.*runtime='ray'"):
        check_stages(alpa.Options(num_stages=2))
    with pytest.raises(alpa.PlanError, match=r"the plan has 2 stages.*runtime='ray'"):
        check_stages(alpa.Options(plan=plan))
    check_stages(alpa.Options())
    check_stages(alpa.Options(num_stages=1))


def test_a_process_alone_gets_the_plan_it_makes(plan):
    assert not is_distributed()
    assert agreed_plan(lambda: plan) == plan
    with pytest.raises(alpa.PlanError, match="no plan fits"):

        def refuse():
            raise alpa.PlanError("no plan fits")

        agreed_plan(refuse)
