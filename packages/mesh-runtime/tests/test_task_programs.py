from importlib.util import find_spec

import jax
import jax.export
import numpy as np
import pytest
from attrs import evolve
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_interchange.schedule import Instruction
from mesh_runtime import ExportedProgram
from mesh_runtime.task_programs import LoadedProgram, check_tasks, task_programs

needs_flatbuffers = pytest.mark.skipif(
    find_spec("flatbuffers") is None, reason="needs the extra mesh-runtime[export]"
)


def run(task, *inputs):
    return Instruction(kind="run", task=task, inputs=inputs, outputs=("out",))


def export(function, mesh, *specs, donated=(), dtype=np.float32):
    arguments = [
        jax.ShapeDtypeStruct((8, 8), dtype, sharding=NamedSharding(mesh, spec)) for spec in specs
    ]
    program = bytes(jax.export.export(jax.jit(function))(*arguments).serialize())
    return ExportedProgram(program=program, donated=donated)


@needs_flatbuffers
def test_a_program_with_explicit_collectives_keeps_them_and_runs_on_another_mesh(meshes):
    first, second = meshes(2, (1, 4))

    def local(x, w):
        return (jax.lax.psum(x @ w, "model"),)

    sharded = jax.shard_map(
        local, mesh=first, in_specs=(P(None, "model"), P("model")), out_specs=(P(),)
    )
    exported = export(sharded, first, P(None, "model"), P("model"))
    (program,) = task_programs([run("t", "x", "w")], {"t": exported}, second).values()
    values = [np.random.default_rng(k).normal(size=(8, 8)).astype(np.float32) for k in range(2)]
    arguments = [
        jax.device_put(value, NamedSharding(second, spec))
        for value, spec in zip(values, (P(None, "model"), P("model")), strict=True)
    ]
    (out,) = program(*arguments)
    assert set(out.sharding.device_set) == set(second.devices.flat)
    np.testing.assert_allclose(out, values[0] @ values[1], rtol=1e-5, atol=1e-5)
    assert isinstance(program, LoadedProgram)
    assert "all-reduce" in program.compiled.as_text()


@needs_flatbuffers
def test_an_exported_program_overwrites_only_donated_inputs(meshes):
    (mesh,) = meshes(1)
    exported = export(lambda a, b: (a + b,), mesh, P("data"), P("data"), donated=("a",))
    instruction = run("t", "a@0", "b")
    (program,) = task_programs([instruction], {"t": exported}, mesh).values()
    a, b = (
        jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("data"))) for _ in "ab"
    )
    program(a, b)
    assert a.is_deleted() and not b.is_deleted()


@needs_flatbuffers
@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "bool", "complex64"])
def test_programs_take_elements_of_all_sizes(meshes, dtype):
    (mesh,) = meshes(1)
    exported = export(lambda a: (a.T,), mesh, P("data"), donated=("a",), dtype=dtype)
    (program,) = task_programs([run("t", "a")], {"t": exported}, mesh).values()
    whole = np.eye(8, k=1).astype(dtype)
    (out,) = program(jax.device_put(whole, NamedSharding(mesh, P("data"))))
    np.testing.assert_array_equal(out, whole.T)


@needs_flatbuffers
def test_equal_programs_are_compiled_once(meshes):
    (mesh,) = meshes(1)
    exported = export(lambda a: (a * 2,), mesh, P())
    programs = task_programs([run("s", "a"), run("t", "b")], {"s": exported, "t": exported}, mesh)
    assert programs["s"] is programs["t"]


@needs_flatbuffers
def test_programs_of_the_wrong_size_or_arity_are_refused(meshes):
    (mesh,) = meshes(1)
    exported = export(lambda a: (a * 2,), mesh, P())
    with pytest.raises(ValueError, match="takes 1 arrays, but is given 2"):
        task_programs([run("t", "a", "b")], {"t": exported}, mesh)
    with pytest.raises(ValueError, match=r"task 't' donates \['z'\], which are no inputs"):
        task_programs([run("t", "a")], {"t": evolve(exported, donated=("z",))}, mesh)
    (other,) = meshes(1, (1, 2))
    with pytest.raises(ValueError, match="is for 4 devices, but its mesh has 2"):
        task_programs([run("t", "a")], {"t": exported}, other)


def test_a_task_needs_an_executable_and_one_mesh():
    with pytest.raises(ValueError, match=r"\(run 't'\) has no executable; .* given for 's'"):
        check_tasks([[run("t")]], {"s": list})
    with pytest.raises(ValueError, match="task 't' runs on mesh 0 and on mesh 1"):
        check_tasks([[run("t")], [run("t")]], {"t": list})
