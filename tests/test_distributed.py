"""Several processes under `jax.distributed`: one plan, which the first process makes."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap

import numpy as np

import alpa_meta as alpa

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax
    import jax.numpy as jnp
    import numpy as np

    import alpa_meta as alpa

    number, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, num_processes=2, process_id=number)


    def step(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(weights)
        return weights - gradient, loss


    def refused(parallel):
        try:
            parallel.plan_for(weights, x)
        except alpa.PlanError as error:
            return str(error)


    weights, x = np.eye(8, dtype=np.float32) / 2, np.ones((8, 8), np.float32)
    # each process would choose otherwise by itself
    parallel = alpa.parallelize(step, cache=False, mesh_shape=(4,) if number == 0 else (2, 2))
    losses = []
    for _ in range(3):
        weights, loss = parallel(weights, x)
        losses.append(float(loss))
    cut = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()), ("a",)), jax.sharding.PartitionSpec("a")
    )
    state = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=cut)(), "n": 3}
    for k in (1, 2):
        folder = alpa.save(sys.argv[3], state, step=k).wait()
    restored = alpa.restore(sys.argv[3], like=state)
    shards = {s.index[0].start: s.data.tolist() for s in restored["w"].addressable_shards}
    limit = 1 if number == 0 else None
    print("FOUND", json.dumps({
        "losses": losses,
        "shards": shards,
        "n": restored["n"],
        "wrote": sorted(one.name for one in folder.glob("ocdbt.process_*")),
        "mesh": parallel.plan.shardings[0].mesh.logical.shape,
        "stages": refused(alpa.parallelize(step, num_stages=2)),
        "impossible": refused(alpa.parallelize(step, cache=False, memory=limit)),
    }))
    """
)


def test_two_processes_run_the_plan_of_the_first_and_write_one_checkpoint(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=2", os.environ["XLA_FLAGS"]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(number), address, tmp_path / "checkpoints"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (
        json.loads(line.removeprefix("FOUND "))
        for out, _ in outputs
        for line in out.splitlines()
        if line.startswith("FOUND ")
    )
    assert first["losses"] == second["losses"]
    assert first["mesh"] == second["mesh"] == [4]
    assert first["shards"] == {"0": [0, 1], "2": [2, 3]}
    assert second["shards"] == {"4": [4, 5], "6": [6, 7]}
    assert first["n"] == second["n"] == 3
    assert first["wrote"] == ["ocdbt.process_0", "ocdbt.process_1"]
    found = alpa.restore(tmp_path / "checkpoints", like={"w": np.zeros(8, np.float32), "n": 0})
    assert found["w"].tolist() == list(range(8))

    weights, x = np.eye(8, dtype=np.float32) / 2, np.ones((8, 8), np.float32)
    assert np.isclose(first["losses"][0], np.mean((np.tanh(x @ weights) - x) ** 2))
    assert first["losses"][2] < first["losses"][0]
    for found in (first, second):
        assert "run pipelines on their hosts with runtime='ray'" in found["stages"]
    assert second["impossible"] == f"process 0 could not plan: {first['impossible']}"
