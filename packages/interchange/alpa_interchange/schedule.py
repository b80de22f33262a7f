"""Pipeline schedules as static instruction lists: simulated, drawn and executed from one object."""

from __future__ import annotations

from collections import Counter

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_empty, positive

INSTRUCTION_KINDS = ("run", "send", "receive", "free")
TASK_PHASES = (
    "start",
    "statistics",
    "forward",
    "backward",
    "backward_input",  # the part of a split backward that the previous stage waits for
    "backward_weight",  # the rest of it
    "update",
)


@frozen(kw_only=True)
class TaskSpec:
    """One compiled program of a pipeline: which mesh runs it, and the values it reads and writes.

    Statistics, forward and backward tasks (in one or two parts) run once per microbatch; of one cut
    into token slices each is of slice `slice_index`. Start and update tasks run once per step. The
    statistics of all microbatches run before their other tasks. A value both read and written (a
    gradient accumulator) is updated in place.
    `donated` inputs are consumed by the run.
    """

    name: str = field(validator=non_empty)
    mesh: int
    stage: int  # differs from mesh when a mesh runs several stages (interleaved schedules)
    phase: str = field(validator=OneOf(*TASK_PHASES))
    slice_index: int = 0
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        strangers = set(self.donated) - set(self.inputs)
        if strangers:
            raise ValueError(
                f"TaskSpec.donated of {self.name!r} must be among its inputs, got "
                f"{sorted(strangers)}"
            )


@frozen(kw_only=True)
class TaskGraph:
    """All tasks of one training step, and the scope of their values.

    Values in `per_step` exist once (state, accumulators, scalars of the update); every other value
    exists once per microbatch. `inputs` are on `home[k]` (mesh number of inputs[k]) before the
    step; `outputs` must exist after it. State that two meshes read is an input of its home mesh and
    is sent to the other once per step; an input that exists once per microbatch is on every mesh
    that reads it.
    """

    tasks: tuple[TaskSpec, ...]
    per_step: tuple[str, ...]
    inputs: tuple[str, ...]
    home: tuple[int, ...]
    outputs: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.home) != len(self.inputs):
            raise ValueError(
                f"TaskGraph.home needs one mesh per input: {len(self.inputs)}, got {len(self.home)}"
            )
        count = Counter(task.name for task in self.tasks)
        twice = sorted(name for name, times in count.items() if times > 1)
        if twice:
            raise ValueError(
                f"TaskGraph.tasks must have distinct names, got {twice} more than once"
            )

    def check_places(self, num_stages: int, num_meshes: int) -> None:
        """Raise ValueError unless all tasks are of `num_stages` stages and run on `num_meshes`
        meshes, where all inputs are."""
        for task in self.tasks:
            if not (0 <= task.stage < num_stages and 0 <= task.mesh < num_meshes):
                raise ValueError(
                    f"task {task.name!r} is of stage {task.stage} on mesh {task.mesh}, but there "
                    f"are {num_stages} stages on {num_meshes} meshes"
                )
        if self.home and not 0 <= min(self.home) <= max(self.home) < num_meshes:
            raise ValueError(
                f"TaskGraph.home must be of meshes 0..{num_meshes - 1}, got "
                f"{min(self.home)}..{max(self.home)}"
            )


@frozen(kw_only=True)
class Instruction:
    """One step of one mesh. Buffers are named `value` (per step) or `value@microbatch`.

    run      execute `task`, reading `inputs`, writing `outputs`
    send     hand the buffers `inputs` to mesh `peer`, which receives them under the same names
    receive  take the buffers `outputs` from mesh `peer`
    free     drop the buffers `inputs`
    """

    kind: str = field(validator=OneOf(*INSTRUCTION_KINDS))
    task: str = ""
    phase: str = ""
    stage: int = 0
    microbatch: int | None = None  # None: once per step
    slice_index: int = 0  # token slice within the microbatch
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    peer: int | None = None


@frozen(kw_only=True)
class PipelineSchedule:
    """One instruction list per mesh. Sends and receives between two meshes match in order."""

    name: str
    num_stages: int = field(validator=positive)
    num_microbatches: int = field(validator=positive)
    programs: tuple[tuple[Instruction, ...], ...]
