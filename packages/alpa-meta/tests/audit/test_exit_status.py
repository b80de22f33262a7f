"""`alpa audit` as a user meets it: a program with a collective of its own exits with status 1."""

from __future__ import annotations

import os
import re
import subprocess
import sys

PROGRAM = '''
"""A step with an operator that communicates behind the plan's back if its name is `chatty`."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from alpa_meta.corpus.model import deterministic_model
from alpa_meta.operators import Factors, register
from jax.interpreters import mlir


def elementwise(eqn):
    factors = Factors()
    dims = factors.each(eqn.invars[0].aval.shape)
    return factors.rule([dims], [dims])


def chatter(call):
    (value,) = call.operands
    return [value + 0 * jax.lax.psum(value, call.mesh.axis_names)]


def model(name):
    primitive = jex.Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x, multiple_results=False))
    if name == "chatty":
        register(name, elementwise, chatter)

    def loss(params, batch):
        return jnp.mean((primitive.bind(batch["x"]) @ params["w"]) ** 2)

    return deterministic_model(
        name=name,
        size="tiny",
        init=lambda key: {"w": jax.random.normal(key, (8, 8))},
        loss=loss,
        make_batch=lambda key: {"x": jax.random.normal(key, (8, 8))},
        optimizer=optax.sgd(0.1),
    )


def chatty():
    return model("chatty")


def quiet():
    return model("quiet")
'''


def test_a_program_that_is_not_its_plan_exits_with_1_and_says_what_differs(tmp_path):
    (tmp_path / "talk.py").write_text(PROGRAM)
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    seen = {}
    for name in ("chatty", "quiet"):
        seen[name] = subprocess.run(
            [sys.executable, "-c", "import alpa_meta.cli as cli; cli.main()", "audit"]
            + ["--step", f"talk:{name}", "--mesh", "2", "--random", "1"],
            cwd=tmp_path,
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    chatty, quiet = seen["chatty"], seen["quiet"]
    assert quiet.returncode == 0, quiet.stdout + quiet.stderr
    assert quiet.stdout.count("ok   quiet") == 2
    assert chatty.returncode == 1, chatty.stdout + chatty.stderr
    lines = chatty.stdout.splitlines()
    assert lines[0].startswith("FAIL chatty planner's plan: 1 UNPLANNED")
    (added,) = [line for line in lines if "planner" not in line and line.startswith("+")][:1]
    assert "all-reduce" in added and "added: no planned collective was emitted" in added
