"""`parallelize`: an ordinary training step, run in parallel by a plan found for it."""

from __future__ import annotations

import functools
import html
import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, SupportsIndex, TypeAlias, overload

import jax
from attrs import evolve

import stage_dp
from alpa_interchange import ClusterSpec, KeptMenu, ParallelPlan, PipelineSchedule
from alpa_interchange.plan_text import one_line
from alpa_meta.calls import Calls, call_key, options_for
from alpa_meta.checkpoints.restoring import Checkpoint
from alpa_meta.checkpoints.saving import Saving, save
from alpa_meta.compat import trace_settings
from alpa_meta.errors import NonFiniteError, NonFiniteWarning, PlanError
from alpa_meta.execution.direct_call import NOT_DIRECT, DirectCall, direct_call
from alpa_meta.execution.executable import Executable
from alpa_meta.execution.piecewise import copied, gathered
from alpa_meta.execution.ray_meshes import RayPool
from alpa_meta.execution.state import Unborn, laid_out, placed
from alpa_meta.execution.supervisor import Supervisor
from alpa_meta.lowered import Lowered
from alpa_meta.named_cluster import as_cluster, local_cluster
from alpa_meta.options import Options, with_settings
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.planning.planner import make_plan, restore
from alpa_meta.planning.sampling import sample_plan
from alpa_meta.planning.shape_buckets import Bucket, Buckets, at_planned_shapes
from alpa_meta.planning.shared_plan import agreed_plan, check_stages, is_distributed
from alpa_meta.step.arguments import of_state_and_batch, positional
from alpa_meta.step.program import Step
from alpa_meta.step.pure_call import PureCall, arrays_only, flat_objects
from alpa_meta.survival import RayRuns, resumed, save_if_due
from alpa_meta.types import Function, P, PyTree, R
from mesh_runtime import StepError

if TYPE_CHECKING:
    from alpa_meta.audit.executable import ExecutableAudit
    from alpa_meta.audit.numerics import Reference
    from mesh_runtime import TraceEvent


class ParallelStep(Generic[P, R]):
    """A training step that runs in parallel; made by `parallelize`.

    It is planned and compiled at its first call for each new set of argument shapes.
    """

    __name__: str  # of the step

    def __init__(
        self, function: Callable[P, R], cluster: ClusterSpec | str | None, options: Options
    ) -> None:
        if not callable(function):
            raise TypeError(f"parallelize takes a training step, a function, got {function!r}")
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._cluster = cluster
        self.options = options
        self._calls = Calls(function)
        self._cache: dict[Hashable, tuple[Step, Lowered, PureCall]] = {}
        self._buckets = Buckets()
        self._latest: Hashable = None
        self._running: set[Hashable] = set()  # keys of what is compiled,
        self._evaluated: set[Hashable] = set()  # and without its backward
        self.num_steps = 0  # number of the last step, for what names steps; it may be set
        self._direct: dict[tuple[Hashable, ...], tuple[Hashable, DirectCall]] = {}
        ray = options.ray_options
        self._pool = None if ray is None else RayPool(ray)
        self.supervisor: Supervisor | None = None
        if options.checkpoints is not None:
            if self._pool is None:
                raise PlanError(
                    "Options.checkpoints is where workers on Ray go on from when some fail; give "
                    "runtime='ray', or save the state of this process by alpa.save"
                )
            self.supervisor = Supervisor(RayRuns(self))

    def __repr__(self) -> str:
        if self._latest is None:
            return f"<ParallelStep {self._name}: not planned yet>"
        return f"<ParallelStep {self._name}: {one_line(self.plan)}>"

    def __str__(self) -> str:
        return repr(self) if self._latest is None else f"{self._name}: {self.plan}"

    def _repr_html_(self) -> str:
        if self._latest is None:
            return f"<p>{html.escape(self._name)}: not planned yet</p>"
        return f"<h4>{html.escape(self._name)}</h4>{self.plan._repr_html_()}"

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    @functools.cached_property
    def cluster(self) -> ClusterSpec:
        """The cluster planned for: as given, or the devices of this process."""
        if self._cluster is not None:
            return as_cluster(self._cluster)
        if self._pool is not None:
            raise PlanError(
                "runtime='ray' runs on other processes than this one; name the cluster they make, "
                "such as parallelize(step, cluster='host:8', runtime='ray')"
            )
        return local_cluster()

    def plan_for(self, *args: PyTree, **keywords: PyTree) -> ParallelPlan:
        """Return the plan for arguments (or their shapes) without compiling or running."""
        return self.lower(*args, **keywords).plan

    def random_plan(self, *args: PyTree, seed: int = 0) -> ParallelPlan:
        """Return a random feasible plan for arguments or their shapes: a test of correctness.

        Run it with `parallelize(step, plan=...)`; options fix what they name.
        """
        step = self._calls.traced(self._pure(args), self.options)
        return sample_plan(step, self.cluster, options_for(step, self.options), seed).plan

    def lower(self, *args: PyTree, **keywords: PyTree) -> Lowered:
        """Return the step planned for arguments (arrays or ShapeDtypeStructs)."""
        return self._lowered(self._pure(positional(self._function, args, keywords)), runs=False)

    def _lowered(self, call: PureCall, runs: bool = True) -> Lowered:
        key = call_key(call, self.options.static_argnums)
        if key not in self._cache:
            if runs and self._pool is not None:
                self._pool.check_reachable()
            step = self._calls.traced(call, self.options)
            self._cache[key] = (step, Lowered(self._planned(step), self.options, self._pool), call)
        self._latest = key
        return self._cache[key][1]

    def _pure(self, args: Sequence[PyTree]) -> PureCall:
        return self._calls.pure(args, self.options, lambda: self.cluster)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The batch shapes planned so far and how each came by its plan; needs `dynamic_dims`."""
        return tuple(self._buckets.made)

    def _planned(self, step: Step) -> Planned:
        if self._pool is not None or not is_distributed():
            return self._found(step)
        check_stages(self.options)
        return restore(
            step, agreed_plan(lambda: self._found(step).plan), options_for(step, self.options)
        )

    def _found(self, step: Step) -> Planned:
        options = options_for(step, self.options)
        if options.dynamic_dims is not None:
            if options.plan is not None and not self._buckets.made:
                saved = at_planned_shapes(step, options.plan)
                self._buckets.add_origin(saved, restore(saved, options.plan, options))
            return self._buckets.planned(step, options, self._searched)
        if options.plan is not None:
            return restore(step, options.plan, options)
        return self._searched(step)

    def _searched(self, step: Step) -> Planned:
        options = options_for(step, self.options)
        if self._pool is None and is_distributed():
            options = evolve(options, num_stages=1)
        return make_plan(step, self.cluster, options)

    @property
    def plan(self) -> ParallelPlan:
        """The plan of the latest call."""
        if self._latest is None:
            raise PlanError("the step has no plan yet; call it, or plan_for(state, batch), first")
        return self._cache[self._latest][1].plan

    @property
    def menu(self) -> KeptMenu | None:
        """The menu that the plan of the latest call was chosen from, None if none was made."""
        return None if self._latest is None else self._cache[self._latest][1].menu

    @property
    def plan_from_cache(self) -> bool:
        """Whether the plan of the latest call was found by an earlier search (`Options.cache`)."""
        return self._latest is not None and self._cache[self._latest][1].from_cache

    @property
    def schedule(self) -> PipelineSchedule:
        """The instruction list of each mesh in the latest call, made of its plan."""
        return stage_dp.instruction_lists(self.plan)

    @property
    def executable(self) -> Executable:
        """The compiled step of the latest call."""
        if self._latest is None:
            raise PlanError("the step is not compiled yet; call it first")
        return self.compiled()

    @property
    def last_trace(self) -> Sequence[TraceEvent]:
        """The executed instructions of the last step (needs Options(trace="ready"))."""
        return self.executable.last_trace

    def compiled(self, key: Hashable = None) -> Executable:
        """Return the compiled step of the calls of a key; of the latest call."""
        key = self._latest if key is None else key
        self._running.add(key)
        return self._cache[key][1].compile()

    def step_of(self, key: Hashable) -> Step:
        """Return the traced step of the calls of a key."""
        return self._cache[key][0]

    def prepare_workers(self) -> None:
        """Have processes stand by that can take the workers' places."""
        assert self._pool is not None
        self._pool.prepare()

    def replace_workers(self) -> None:
        """End the workers and load all that was compiled on others."""
        assert self._pool is not None
        self._pool.replace()
        for key in self._running:
            self.compiled(key).reload(self._pool)
        for key in self._evaluated:
            self._cache[key][1].evaluation.executable.reload(self._pool)

    def plan_anew(self, cluster: ClusterSpec) -> None:
        """Plan for another cluster from now on, also what was planned already."""
        self.options = evolve(self.options, plan=None)
        self.__dict__["cluster"] = cluster
        self._running.clear()
        self._evaluated.clear()
        for key, (step, _, call) in self._cache.items():
            lowered = Lowered(self._planned(step), self.options, self._pool)
            self._cache[key] = (step, lowered, call)

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> R:
        """Return what the plain step returns, computed by the plan."""
        given = positional(self._function, args, keywords)
        result: R = self._run_direct(given, None)
        if result is not NOT_DIRECT:
            self.num_steps += 1
            return result
        call = self._pure(self._born(given))
        if call.function is not self._function:
            result = self._run_direct(call.args, call.key)
        if result is NOT_DIRECT:
            result = self._run(call)
        self.num_steps += 1
        if self.supervisor is not None:
            save_if_due(self, self.supervisor)
        result = self._cache[self._latest][2].finish(result, call.objects)
        return self._judged(result)

    def _judged(self, result: R) -> R:
        """Return a step's result; say or raise what was found in it (`Options.on_nan`)."""
        if self.options.on_nan is None:
            return result
        found = self.executable.finding
        if found is None:
            return result
        error = NonFiniteError(self.num_steps, found.microbatch, found.task, result)
        if self.options.on_nan == "raise":
            raise error
        warnings.warn(f"{error.found}; the step is skipped", NonFiniteWarning, stacklevel=3)
        return result

    def _run_direct(self, args: Sequence[PyTree], key: Hashable) -> PyTree:
        """Return the pure result of a call like an earlier one, NOT_DIRECT if it is not."""
        leaves, tree = jax.tree.flatten(args)
        found = self._direct.get((tree, key, trace_settings()))
        if found is None:
            return NOT_DIRECT
        latest, direct = found
        result = direct(leaves)
        if result is not NOT_DIRECT:
            self._latest = latest
        return result

    def _run(self, call: PureCall) -> PyTree:
        """Return the result of the pure function of a call."""
        self._lowered(call)
        step, executable = self._cache[self._latest][0], self.compiled()
        if self.supervisor is not None:
            results = self.supervisor.run(self._latest, step.flatten(call.args))
            return step.rebuilt(results)
        results = executable(step.flatten(call.args))
        leaves, tree = jax.tree.flatten(call.args)
        made = direct_call(step, executable, leaves)
        if made is not None:
            self._direct[tree, call.key, trace_settings()] = (self._latest, made)
        return step.rebuilt(results)

    def evaluate(self, *args: PyTree, **keywords: PyTree) -> PyTree:
        """Return what the forward pass alone gives: the state as it was, None for gradients."""
        call = self._pure(self._born(positional(self._function, args, keywords)))
        evaluation = self._lowered(call).evaluation
        self._evaluated.add(self._latest)
        step, _, traced = self._cache[self._latest]
        return traced.finish(step.rebuilt(evaluation(step.flatten(call.args))), call.objects)

    def init(self, make: Function[PyTree], *args: PyTree, batch: PyTree = None) -> PyTree:
        """Return make(*args), every array made where the plan wants it, never whole on one device.

        `make` returns the state (a tuple of all state arguments if there are several); `batch` is
        the other argument (a tuple of all others) or its shapes. Where these are not known yet (no
        `batch`, no call before), the state is made by the first step it is given to.
        """
        unborn = Unborn(make, args)
        if batch is not None:
            given = of_state_and_batch(self._function, unborn.shapes(), batch)
            self._lowered(self._pure(given))
            return self._birth(unborn)
        if self._latest is not None and self._matches(unborn):
            return self._birth(unborn)
        return unborn

    def place(self, *state: PyTree) -> PyTree:
        """Return state arguments (host or device arrays) laid out as the plan wants them."""
        self._require_plan()
        result = placed(self.compiled(), state)
        return result[0] if len(state) == 1 else result

    def gather(self, tree: PyTree) -> PyTree:
        """Return state or results with every array whole on the host."""
        try:
            return gathered(tree)
        except StepError as error:
            if self.supervisor is None or not self.supervisor.can_recover():
                raise
            self.supervisor.recover(error)
            return gathered(tree)

    def save(
        self,
        folder: str | os.PathLike[str],
        state: PyTree,
        *,
        step: SupportsIndex,
        settings: Mapping[str, object] | None = None,
        keep: int | None = None,
        host_bytes: int | None = None,
    ) -> Saving:
        """Begin a checkpoint as `alpa.save`; if it is of the state after the last step, and workers
        fail, the run goes on from it (`Options.checkpoints`)."""
        saving = save(folder, state, step=step, settings=settings, keep=keep, host_bytes=host_bytes)
        if self.supervisor is not None:
            self.supervisor.note(saving, state)
        return saving

    def restore(self, checkpoint: Checkpoint, like: PyTree) -> PyTree:
        """Return the state of a checkpoint (`alpa.read_checkpoint`), every array read by what holds
        it under the plan, never whole in one place; `like` is the state or its shapes."""
        self._require_plan()
        return self._made(
            lambda: checkpoint.restore(laid_out(self.compiled(), like)), str(checkpoint.path)
        )

    def resume(self, state: PyTree) -> PyTree:
        """Return the state of the newest checkpoint in `Options.checkpoints`, laid out as `state`,
        and set `num_steps` to its step; `state` itself if there is no checkpoint."""
        return resumed(self, state)

    def audit(self, *args: PyTree, reference: Reference | None = None) -> ExecutableAudit:
        """Return the audit of the step compiled for arguments: is the program its plan?

        With arrays (not shapes) it also runs, and its result is compared with the plain step's on
        one device, in ulps; the arguments stay usable. `reference` saves computing the latter again
        (`alpa_meta.audit.numerics.single_device_reference`).
        """
        from alpa_meta.audit.numerics import single_device_reference

        call = self._pure(self._born(args))
        executable = self._lowered(call).compile()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(call.args)):
            return executable.audit()
        if reference is None:
            function, arrays = call.on_arrays(self.options.static_argnums)
            plain = jax.jit(lambda *arrays: arrays_only(function(*arrays)))
            whole = gathered(tuple(arrays))
            reference = single_device_reference(plain, whole, jax.random.key(0))
        result = self._run(evolve(call, args=jax.tree.map(copied, call.args)))
        return executable.audit(reference.check(arrays_only(gathered(result))))

    def close(self) -> None:
        """End the processes that the step runs on (`runtime="ray"`); their arrays are lost."""
        if self.supervisor is not None:
            self.supervisor.wait()
        if self._pool is not None:
            self._pool.close()

    def _require_plan(self) -> None:
        if self._latest is None:
            raise PlanError("the step has no plan yet; call plan_for(state, batch) first")

    def _matches(self, unborn: Unborn) -> bool:
        step = self._cache[self._latest][0]
        wanted = [
            (tuple(leaf.aval.shape), leaf.aval.dtype)
            for leaf in step.leaves
            if leaf.role == "state"
        ]
        made = [
            (tuple(leaf.shape), leaf.dtype)
            for leaf in flat_objects(unborn.shapes())[0]
            if hasattr(leaf, "dtype")
        ]
        return wanted == made

    def _born(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        if not any(isinstance(arg, Unborn) for arg in args):
            return args
        shapes = tuple(arg.shapes() if isinstance(arg, Unborn) else arg for arg in args)
        self.lower(*shapes)
        return tuple(self._birth(arg) if isinstance(arg, Unborn) else arg for arg in args)

    def _birth(self, unborn: Unborn) -> PyTree:
        return self._made(lambda: unborn.born(self.compiled()), "the first state")

    def _made(self, make: Callable[[], PyTree], name: str) -> PyTree:
        """Return a state, which the supervisor can have made again."""
        state = make()
        if self.supervisor is not None:
            self.supervisor.note_source(state, make, name)
        return state


AnyStep: TypeAlias = "ParallelStep[..., PyTree]"  # type: ignore[explicit-any]  # of any signature


@overload
def parallelize(
    function: Callable[P, R],
    *,
    cluster: ClusterSpec | str | None = None,
    options: Options | None = None,
    **settings: object,
) -> ParallelStep[P, R]: ...
@overload
def parallelize(
    function: None = None,
    *,
    cluster: ClusterSpec | str | None = None,
    options: Options | None = None,
    **settings: object,
) -> Callable[[Callable[P, R]], ParallelStep[P, R]]: ...


def parallelize(
    function: Callable[P, R] | None = None,
    *,
    cluster: ClusterSpec | str | None = None,
    options: Options | None = None,
    **settings: object,
) -> ParallelStep[P, R] | Callable[[Callable[P, R]], ParallelStep[P, R]]:
    """Return `function`, an ordinary training step, as a `ParallelStep`.

    Use it as a decorator or as a call. `cluster` is a name of the catalogue ("host:8", "h100:16"),
    a TOML file or a ClusterSpec; by default the devices of this process. `settings` are fields of
    `Options`; with `runtime="ray"` the step runs on the processes of a Ray cluster.
    """
    chosen = with_settings(options, settings)
    if function is None:
        return lambda inner: ParallelStep(inner, cluster, chosen)
    return ParallelStep(function, cluster, chosen)
