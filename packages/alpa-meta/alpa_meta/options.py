"""What a user may set about planning and running a step; every field is checked here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TypeAlias, TypeGuard

import jax
from attrs import Attribute, evolve, field, fields, frozen
from jax.sharding import PartitionSpec

from alpa_interchange import ParallelPlan
from alpa_interchange.amounts import parse_bytes
from alpa_interchange.menu import RECOMPUTATIONS
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.types import Fields, PyTree, Spec
from mesh_runtime import TRACE_MODES, RayOptions

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how many parts are done, how many there are)."""

Recomputation = str | Sequence[str] | Mapping[int, str] | None
"""What the backward pass computes again: the same for every layer, or of each layer by number;
None: nothing."""

OFFLOADED = ("moments", "none")
RUNTIMES = ("in-process", "ray")
EXECUTORS = ("auto", "shard_map", "constraint")
NAN_POLICIES = ("raise", "skip")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "adaptive", "interleaved-1f1b", "zero-bubble-h1")


Validator: TypeAlias = "Callable[[object, Attribute[PyTree], PyTree], None]"


def _quiet(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def _reporter(progress: Progress | None) -> Progress:
    return _quiet if progress is None else progress


def _tuple(value: object) -> object:
    """Return lists as tuples and one number as a tuple of it."""
    if _is_int(value):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _path(value: object) -> object:
    """Return the path that a text names."""
    return Path(value) if isinstance(value, str) else value


def _bytes(value: object) -> object:
    """Return the bytes that a size such as "16GiB" names."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise PlanError(f"Options.memory: {error}") from None


def _must(rule: str, holds: Callable[[object], bool]) -> Validator:
    """Return a validator that requires `holds` and says it as "must be `rule`"."""

    def check(_: object, attribute: Attribute[object], value: object) -> None:
        if not holds(value):
            raise PlanError(f"Options.{attribute.name} must be {rule}, got {value!r}")

    return check


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _optional(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _count(value: object) -> bool:
    return _is_int(value) and value >= 1


def _positions(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(one) and one >= 0 for one in value)


def _names(value: object) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
        return False
    return len(value) > 0 and len(set(value)) == len(value)


def _is_spec(value: object) -> bool:
    def is_entry(entry: object) -> bool:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED or isinstance(entry, str):
            return True
        return isinstance(entry, (tuple, list)) and all(isinstance(one, str) for one in entry)

    return isinstance(value, Iterable) and not isinstance(value, str) and all(map(is_entry, value))


def _pins(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(path, str) and _is_spec(spec) for path, spec in value.items()
    )


def _dims(value: object) -> bool:
    def is_mark(mark: object) -> bool:
        return all(map(_is_int, mark if isinstance(mark, (set, frozenset)) else (mark,)))

    return all(map(is_mark, jax.tree.leaves(value)))


def _recomputation(value: object) -> bool:
    if isinstance(value, Mapping):
        return _positions(tuple(value)) and _recomputation(tuple(value.values()))
    named = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, str) and one in RECOMPUTATIONS for one in named)


def _one_of(names: tuple[str, ...]) -> Validator:
    return _must(f"one of {', '.join(names)}", lambda value: value in names)


def _known_preset(_: object, __: object, name: str | None) -> None:
    if name is not None:
        from alpa_meta.presets import check_preset  # late: what presets need takes 0.2 s to import

        check_preset(name)


_COUNT_OR_NONE = _must(
    "a whole number of at least 1, or None for the planner's choice", _optional(_count)
)
_POSITIONS = "positions of arguments, numbers from 0 on"
_TRUTH = _must("True or False", lambda value: isinstance(value, bool))


@frozen(kw_only=True)
class Options:
    """Options of `parallelize`. None means: the planner chooses.

    `schedule` is chosen of all `SCHEDULES`. `memory` is bytes per device that the plan may use, a
    number or "16GiB" (default: what the cluster says).
    `batch_argnums` are the arguments that microbatches split along their first dim (default: array
    arguments that are not returned as new state, without those whose arrays differ in their first
    dim where others agree in theirs), or, where that cannot be cut, another dim that all of them
    have (`alpa_meta.planning.batch_search`); `static_argnums` are not traced. `plan` runs a given
    plan.
    `num_token_slices` cuts the sequences of every microbatch into slices of tokens that pass
    through the stages one after another, `token_slices` into slices of these lengths; the step must
    be causal, which is proved of the traced program (`alpa_meta.token_slices`).
    `recompute` says what the backward pass computes again instead of keeping it: "full" keeps what
    each layer is given, "selective" also what is dear to redo, "none" everything; for all layers,
    or a sequence or mapping of them (`alpa_meta.inter_op.recomputation`).
    `offload="moments"` keeps the optimiser's arrays in the memory of the hosts, from where each
    update takes them (`alpa_meta.execution.host_memory`), "none" keeps them on the devices; None:
    on the devices where any plan fits so (`alpa_meta.planning.offload_choice`).
    `exact` refuses microbatches for a step whose result would change with them (batch statistics,
    random numbers shaped by the batch). `pins` fixes input shardings: path -> PartitionSpec-like
    tuple, for all logical meshes that have the named axes. `preset` plans under the constraints of
    a named parallelism (`alpa_meta.presets`). `mesh_shape` allows only logical meshes of this
    shape; `axis_names` are the names of mesh axes that pins use. `dynamic_dims` marks the dims of
    the batch that may vary from call to call, as a pytree prefix of the batch (of the tuple of
    batch arguments if there are several) with a dim, a set of dims or None per leaf: batches that
    differ in nothing else share their choices, without another search
    (`alpa_meta.planning.shape_buckets`).
    `solver_seconds` is the time for one selection problem; without it limits are counts of work,
    and the same step, cluster and options give the same plan however busy the machine is.
    `executor` is what runs the stages: shard_map with the planned collectives, or sharding
    constraints with collectives of XLA's choice; "auto" takes the latter for a stage that would
    gather operands for an operator without a sharding rule (`alpa_meta.planning.executor_choice`).
    `cache=False` searches even if the same program, cluster and options were planned before
    (`alpa_meta.planning.plan_cache`).
    `runtime` is what executes the plan: "in-process" on this process's devices, "ray" or
    `RayOptions` on processes of a Ray cluster, one for each host of each mesh
    (`alpa_meta.execution.ray_meshes`).
    `on_nan` says what to do where a microbatch gives NaN or infinity: "raise" NonFiniteError, or
    "skip" the step with a warning; the state stays as it was (`alpa_meta.execution.finite`). None:
    nothing is looked at.
    `checkpoints` is a folder that all nodes see: with a Ray runtime, the state is saved there after
    every `checkpoint_every` steps (0: only by `step.save`), and when workers fail, others take
    their place, restore it and do the steps since again (`alpa_meta.execution.supervisor`).
    """

    num_stages: int | None = field(default=None, validator=_COUNT_OR_NONE)
    num_microbatches: int | None = field(default=None, validator=_COUNT_OR_NONE)
    schedule: str | None = field(
        default=None,
        validator=_must(
            f"one of {', '.join(SCHEDULES)}, or None for the planner's choice",
            lambda value: value is None or value in SCHEDULES,
        ),
    )
    num_token_slices: int | None = field(default=None, validator=_COUNT_OR_NONE)
    token_slices: tuple[int, ...] | None = field(
        default=None,
        converter=_tuple,
        validator=_must(
            "the numbers of tokens of the slices such as (512, 384), or None",
            _optional(lambda v: isinstance(v, tuple) and len(v) > 0 and all(map(_count, v))),
        ),
    )
    num_layers: int | None = field(default=None, validator=_COUNT_OR_NONE)
    recompute: Recomputation = field(
        default=None,
        converter=_tuple,
        validator=_must(
            f"one of {', '.join(RECOMPUTATIONS)}, one for each layer, a mapping from layers to "
            "them, or None",
            _optional(_recomputation),
        ),
    )
    offload: str | None = field(
        default=None,
        validator=_must(
            f"one of {', '.join(OFFLOADED)}, or None",
            lambda value: value is None or value in OFFLOADED,
        ),
    )
    memory: float | None = field(
        default=None,
        converter=_bytes,
        validator=_must(
            "bytes above 0 or a size such as '16GiB'", _optional(lambda v: _is_number(v) and v > 0)
        ),
    )
    mesh_shape: tuple[int, ...] | None = field(
        default=None,
        converter=_tuple,
        validator=_must(
            "the sizes of mesh axes such as (2, 4)",
            _optional(lambda v: isinstance(v, tuple) and len(v) > 0 and all(map(_count, v))),
        ),
    )
    max_mesh_axes: int = field(default=2, validator=_must("a whole number of at least 1", _count))
    plan: ParallelPlan | None = field(
        default=None,
        validator=_must(
            "a ParallelPlan, such as alpa_interchange.load(path, ParallelPlan) returns",
            _optional(lambda value: isinstance(value, ParallelPlan)),
        ),
    )
    progress: Progress = field(
        default=None,
        converter=_reporter,
        validator=_must("a function of (what, number done, number in all)", callable),
    )
    batch_argnums: tuple[int, ...] | None = field(
        default=None, converter=_tuple, validator=_must(_POSITIONS, _optional(_positions))
    )
    static_argnums: tuple[int, ...] = field(
        default=(), converter=_tuple, validator=_must(_POSITIONS, _positions)
    )
    donate: bool = field(default=True, validator=_TRUTH)
    exact: bool = field(default=True, validator=_TRUTH)
    solver_seconds: float | None = field(
        default=None,
        validator=_must(
            "seconds above 0, or None for limits that count work",
            _optional(lambda v: _is_number(v) and v > 0),
        ),
    )
    seed: int = field(
        default=0, validator=_must("a whole number of at least 0", lambda v: _is_int(v) and v >= 0)
    )
    trace: str = field(default="none", validator=_one_of(TRACE_MODES))
    pins: Mapping[str, Spec] = field(
        factory=dict,
        validator=_must(
            "path -> one entry per dim, each None, the name of a mesh axis or several names, such "
            "as {\"params['w']\": (None, 'x')}",
            _pins,
        ),
    )
    preset: str | None = field(default=None, validator=_known_preset)
    axis_names: tuple[str, ...] = field(
        default=AXIS_NAMES,
        converter=_tuple,
        validator=_must("at least one name, all different", _names),
    )
    dynamic_dims: PyTree = field(
        default=None,
        validator=_must("a dim, a set of dims or None, or a pytree of them", _dims),
    )
    executor: str = field(default="auto", validator=_one_of(EXECUTORS))
    cache: bool = field(default=True, validator=_TRUTH)
    on_nan: str | None = field(
        default=None,
        validator=_must(
            f"one of {', '.join(NAN_POLICIES)}, or None",
            lambda value: value is None or value in NAN_POLICIES,
        ),
    )
    runtime: str | RayOptions = field(
        default="in-process",
        validator=_must(
            f"one of {', '.join(RUNTIMES)}, or RayOptions(...)",
            lambda value: value in RUNTIMES or isinstance(value, RayOptions),
        ),
    )

    checkpoints: Path | None = field(
        default=None,
        converter=_path,
        validator=_must("a folder, or None", _optional(lambda value: isinstance(value, Path))),
    )
    checkpoint_every: int = field(
        default=100,
        validator=_must("a whole number of at least 0", lambda v: _is_int(v) and v >= 0),
    )

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that the planner chooses from."""
        return SCHEDULES if self.schedule is None else (self.schedule,)

    @property
    def slice_request(self) -> SliceRequest:
        """The token slices asked for."""
        lengths, count = self.token_slices or (), self.num_token_slices or 0
        if lengths and count not in (0, len(lengths)):
            raise PlanError(
                f"Options.num_token_slices is {count}, but Options.token_slices has {len(lengths)} "
                f"lengths, {lengths}; leave one of them out"
            )
        return SliceRequest(lengths, count)

    @property
    def ray_options(self) -> RayOptions | None:
        """How to run on Ray; None to run in this process."""
        if self.runtime == "in-process":
            return None
        return self.runtime if isinstance(self.runtime, RayOptions) else RayOptions()


def with_settings(options: Options | None, settings: Fields) -> Options:
    """Return `options` (the defaults, if None) with some fields set anew."""
    if not (options is None or isinstance(options, Options)):
        raise PlanError(f"options must be alpa_meta.Options, got {options!r}")
    names = [one.name for one in fields(Options)]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise TypeError(f"there is no option {name!r}; {hint}")
    return evolve(options or Options(), **settings)
