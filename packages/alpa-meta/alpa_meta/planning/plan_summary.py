"""What a plan says about the program, its layers and each stage, for people and for other
programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

import jax
import numpy as np

from alpa_interchange import (
    DeviceMesh,
    InputSummary,
    Layer,
    PlacedStage,
    ProgramSummary,
    ShardingSolution,
    StageSharding,
)
from alpa_meta.compat import JaxprEqn, name_stack, open_jaxpr, shape_of
from alpa_meta.inter_op.candidates import (
    Outlook,
)
from alpa_meta.inter_op.layering import Layering, tensor_bytes
from alpa_meta.inter_op.sent_costs import collective_seconds
from alpa_meta.inter_op.stage_selection import boundary_bytes
from alpa_meta.intra_op.folding import fold_keys, layer_classes
from alpa_meta.intra_op.selection import Selection
from alpa_meta.operators import flops, kernel_kind, sharding_rule
from alpa_meta.operators.regions import bodies, is_region, is_scan
from alpa_meta.planning.executor_choice import chosen_executor
from alpa_meta.planning.operator_names import StageNames
from alpa_meta.planning.plan_identity import files_hash, fingerprint
from alpa_meta.planning.plan_operators import received_specs, stage_operators
from alpa_meta.step.program import Program, Step
from cost_model.profile import profile_directory

_PACKAGES = (
    "alpa-meta",
    "alpa-interchange",
    "cost-model",
    "ilp-sharding",
    "stage-dp",
    "resharding",
    "mesh-runtime",
    "jax",
)


def stage_sharding(
    program: Program,
    placed: PlacedStage,
    selection: Selection,
    solution: ShardingSolution,
    memory: dict[str, float],
    executor: str,
    names: StageNames,
    stage: int,
) -> StageSharding:
    """Return how `stage` runs under its solution; `executor` is `Options.executor`."""
    choice = solution.choice
    assert choice is not None
    state = {
        leaf.path: selection.spec(var, choice)
        for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True)
        if var in selection.sources
    }
    activations = {}
    for eqn, phase in zip(selection.stage.eqns, selection.stage.phases, strict=True):
        shown = is_scan(eqn) or kernel_kind(eqn) != "elementwise"
        if phase == "forward" and shown:
            activations[_label(eqn)] = selection.spec(eqn.outvars[0], choice)
    eqns = selection.stage.eqns
    replicated = dict.fromkeys(_without_rule(eqns))
    chosen, freed = chosen_executor(
        executor,
        eqns,
        (selection.strategy(k, choice) for k in range(len(eqns))),
        {var: selection.spec(var, choice) for var in selection.sources},
    )
    return StageSharding(
        mesh=DeviceMesh(
            submesh=placed.candidate.submesh,
            logical=placed.candidate.logical,
            device_ids=placed.device_ids,
        ),
        solution=solution,
        operators=stage_operators(selection, names.of_stage(stage), choice),
        received_specs=received_specs(selection, names, choice),
        state_specs=state,
        activation_specs=activations,
        memory=memory,
        collective_seconds=collective_seconds(selection, choice),
        replicated_ops=tuple(name for name in replicated if name not in freed),
        executor=chosen,
        freed_ops=freed,
    )


def _without_rule(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    """Yield the operators on arrays that have no sharding rule, those inside regions too."""
    for eqn in eqns:
        if is_region(eqn):
            for body in bodies(eqn):
                yield from _without_rule(open_jaxpr(body).eqns)
        elif sharding_rule(eqn) is None:
            if any(shape_of(var) for var in eqn.outvars):
                yield eqn.primitive.name


def _label(eqn: JaxprEqn) -> str:
    scope = name_stack(eqn).replace("jvp(", "").replace("transpose(", "").replace(")", "")
    shape = ",".join(map(str, shape_of(eqn.outvars[0])))
    return f"{scope or 'step'} {eqn.primitive.name}[{shape}]"


def program_summary(
    program: Program, step: Step, known_fingerprint: str | None = None
) -> ProgramSummary:
    """Return what identifies the program; its fingerprint, if known, is not made again."""
    return ProgramSummary(
        fingerprint=known_fingerprint or fingerprint(step),
        inputs=tuple(
            InputSummary(path=path, shape=shape, dtype=dtype, role=leaf.role, memory=leaf.memory)
            for leaf, (path, shape, dtype) in zip(program.inputs, program.signature(), strict=True)
        ),
        num_ops=len(program.jaxpr.eqns),
        batch_size=step.batch_size,
        phases_from=program.phases.recognised_by,
        token_slices=program.slices.lengths if program.slices else (),
    )


def layer_summaries(outlook: Outlook, layering: Layering) -> tuple[Layer, ...]:
    count = outlook.num_layers
    work = np.zeros((count, 2))
    for eqn, phase, layer in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        if layer is not None and phase != "update":
            work[layer, phase == "backward"] += flops(eqn)
    keys = fold_keys(layering.eqns, layering.phases, layering.layers)
    classes = layer_classes(keys, layering.layers, count)
    parameters = np.zeros(count)
    for var, leaf, readers in zip(
        outlook.program.jaxpr.invars, outlook.program.inputs, layering.input_layers, strict=True
    ):
        if leaf.role == "state" and readers:
            parameters[min(readers)] += tensor_bytes(var)
    crossing = boundary_bytes(outlook.program, outlook.staging, count)
    return tuple(
        Layer(
            index=k,
            equivalence_class=classes[k],
            forward_flops=float(work[k, 0]),
            backward_flops=float(work[k, 1]),
            parameter_bytes=float(parameters[k]),
            boundary_bytes=float(crossing[k]),
            recomputation=layering.recomputation[k],
        )
        for k in range(count)
    )


def provenance() -> dict[str, str]:
    """Return what the figures of a plan depend on beside its program and cluster: the versions of
    the packages, and the measured profiles of this user."""
    versions = {"profiles": files_hash(profile_directory(), "*.json")[:16]}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "source"
    versions["jax"] = jax.__version__
    return versions
