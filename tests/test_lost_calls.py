"""Ray loses calls and their answers, and every step is done once all the same."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra alpa-meta[ray]")
pytestmark = pytest.mark.ray

LOSSES = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": 12,
        "req_failure_prob": 5,
        "resp_failure_prob": 5,
    }
}
"""Ray loses calls of actors before they are sent, and answers that came."""

PROGRAM = """
import jax, numpy as np
import alpa_meta as alpa
from equal_trees import assert_equal
from test_ray_survival import BATCH, batch, make, step

def main():
    near = alpa.parallelize(step, cluster="host:2", num_stages=2, num_microbatches=2)
    key = jax.random.key(0)
    expected = near.init(make, key, batch=BATCH)
    # a call that is lost comes again after a second, and heartbeats get lost as well
    options = alpa.RayOptions(step_timeout=100.0, heartbeat_timeout=100.0)
    far = alpa.parallelize(step, plan=near.plan, runtime=options)
    state = far.init(make, key, batch=BATCH)
    for number in range(30):
        expected, wanted = near(expected, batch(number))
        state, found = far(state, batch(number))
        assert_equal(far.gather(found), wanted)
    assert_equal(far.gather(state), near.gather(expected))
    far.close()

main()
"""


@pytest.mark.fault(
    "calls and answers of Ray lost", "called again; every step is done once, parameters bit-equal"
)
def test_steps_are_done_once_where_calls_and_answers_get_lost():
    paths = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "RAY_testing_rpc_failure": json.dumps(LOSSES),
        "RAY_ADDRESS": "local",
        "PYTHONPATH": os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RpcError" in done.stdout + done.stderr, "no call was lost"
