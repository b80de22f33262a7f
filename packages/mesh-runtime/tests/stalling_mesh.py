"""One mesh of a two-mesh step in a process of its own, which can be stopped in the middle of it."""

import os
import signal

import jax
import numpy as np

import resharding
from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.schedule import Instruction, PipelineSchedule
from alpa_interchange.tensor import ShardingSpec, TensorType
from mesh_runtime.layout import Layout
from mesh_runtime.transfers import device_owners
from mesh_runtime.worker import MeshWorker
from mesh_runtime.worker_mesh import WorkerMesh, worker_name
from mesh_runtime.worker_types import WorkerProgram, WorkerStep, own_list
from resharding.socket_link import SocketLink

MESHES = [WorkerMesh(shape=(1,), axis_names=("x",), num_hosts=1)] * 2
SHAPE = (8 << 20,)  # of float32: 8 requests of 4 MiB over a connection
SCHEDULE = PipelineSchedule(
    name="one value",
    num_stages=2,
    num_microbatches=1,
    programs=(
        (
            Instruction(kind="run", task="make", outputs=("h@0",)),
            Instruction(kind="send", inputs=("h@0",), peer=1, microbatch=0),
        ),
        (
            Instruction(kind="receive", outputs=("h@0",), peer=0, microbatch=0),
            Instruction(kind="run", task="use", inputs=("h@0",), outputs=("total",)),
        ),
    ),
)


class CountingLink(SocketLink):
    """A link that fetches through sockets, and does something when a number of requests is done."""

    most_inline = 0

    def __init__(self, name, token):
        self.after, self.action, self.fetched = 0, lambda: None, 0
        super().__init__(name, token)

    def lanes(self, peer):
        return 1

    def reads(self, peer):
        return False

    def shares(self, peer):
        return False

    def fetch(self, *given):
        if self.after and self.fetched == self.after:
            self.action()
        super().fetch(*given)
        self.fetched += 1


def stop():
    """Stop this process, as a debugger or a frozen container does; it stays alive."""
    os.kill(os.getpid(), signal.SIGSTOP)


def worker(mesh, token):
    """Return a worker of a mesh that sends and receives by connections only."""
    name = worker_name(mesh, 0)
    transport = resharding.HostTransport(name, token, link=CountingLink(name, token))
    return MeshWorker(mesh, 0, MESHES, transport, jax.devices()[:1])


def install(made, addresses, timeout, before=lambda: None):
    """Load the list of a worker's mesh; `before` is done as its task begins."""
    value = jax.block_until_ready(jax.numpy.ones(SHAPE, np.float32))
    made.transport.connect(addresses, device_owners(MESHES))

    def make():
        before()
        return (value,)

    def use(h):
        before()
        return (h.sum(),)

    made.load(
        WorkerProgram(
            plan="one",
            schedule=own_list(SCHEDULE, made.mesh),
            executables={"make": make, "use": use},
            layouts={"h": Layout((1,), ("x",))},
            timeout=timeout,
        )
    )
    placed = [
        PlacedTensor(
            spec=ShardingSpec(((),)),
            axis_names=("x",),
            mesh_shape=(1,),
            devices=(mesh,),
            hosts=(mesh,),
        )
        for mesh in range(2)
    ]
    task = ReshardingTask(tensor=TensorType(SHAPE, "float32"), source=placed[0], target=placed[1])
    made.route("one", {("h", 0, 1): resharding.plan(task)})


def run(made, number):
    """Return what a step returns."""
    returned = ("total",) if made.mesh == 1 else ()
    work = WorkerStep(plan="one", number=number, bound={}, placed={}, kept={}, returned=returned)
    return made.step(work)[0]


def be(pipe, mesh, token, stops_in_task):
    """Be the worker of a mesh for one step, stopped as its task begins if it is told so."""
    made = worker(mesh, token)
    pipe.send(made.transport.address)
    install(made, pipe.recv(), 60.0, stop if stops_in_task else lambda: None)
    pipe.send("ready")
    try:
        run(made, 1)
        pipe.send("done")
        pipe.recv()
    finally:
        made.close()
