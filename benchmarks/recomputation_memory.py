"""Memory planned and compiled of layers that recompute, on host devices and for GPUs not there.

    .venv/bin/python benchmarks/recomputation_memory.py [--model gpt] [--cluster h100:2]

Of each stage its fullest task: arguments, fresh results and temporaries as XLA states them, beside
what the plan reserves for the stage (which holds the activations of all microbatches in flight, a
task those of one). One stage runs one microbatch, two stages two. GPU programs are compiled ahead
of time; that needs the extra audit-gpu.

    .venv/bin/python benchmarks/recomputation_memory.py --held [--model gpt] [--stages 2]

Of pipelines on host devices, four microbatches and nothing recomputed, what each mesh of one device
holds over its schedule beside the plan: buffers, and with temporaries of the fullest program.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import product

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
).strip()

from attrs import frozen
from rich.console import Console

import alpa_meta
import stage_dp
from alpa_meta.audit.held_memory import held_memory
from alpa_meta.audit.planner_plans import audit_planned
from alpa_meta.corpus import CorpusModel, published
from alpa_meta.corpus.gpt_stacked import build as stacked

KINDS = ("none", "selective", "full")
SIZES = {
    "num_layers": 4,
    "hidden": 512,
    "num_heads": 8,
    "inner": 2048,
    "vocab": 8192,
    "length": 512,
    "batch": 32,
    "dtype": "float32",
}
EXPERTS = {"num_experts": 4, "capacity": 256}
MODELS: Mapping[str, Callable[[], CorpusModel]] = {
    "gpt": lambda: published("gpt-125m", **SIZES),
    "llama": lambda: published("llama-7b", **SIZES, num_key_value_heads=8),
    "moe": lambda: published("gpt-125m", **SIZES, **EXPERTS),
    "gpt-scanned": lambda: stacked("small", scan=True, remat=False),
    "gpt-checkpoint": lambda: stacked("small", scan=False, remat=True),
}


@frozen(kw_only=True)
class Found:
    """Bytes of the fullest task of one stage, compiled and planned."""

    stage: int
    task: str
    planned: float
    compiled: float


def found(model: CorpusModel, cluster: str, num_stages: int, kind: str) -> Iterator[Found]:
    """Yield what each stage takes of the plan with so many stages that recomputes `kind`."""
    options = alpa_meta.Options(
        num_stages=num_stages,
        num_microbatches=num_stages,
        recompute=kind,
        exact=False,
        cache=False,
    )
    memory = audit_planned(model, cluster, options, numerics=False).memory
    for stage in range(num_stages):
        tasks = {name: one for name, one in memory.items() if name.split(".")[1] == str(stage)}
        task = max(tasks, key=lambda name: tasks[name].peak_bytes)
        planned = tasks[task].predicted_peak_bytes or 0.0
        yield Found(stage=stage, task=task, planned=planned, compiled=tasks[task].peak_bytes)


SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zero-bubble-h1")


def held(model: CorpusModel, num_stages: int, schedule: str) -> Iterator[str]:
    """Yield of each stage what is planned and held, in words."""
    num_devices = num_stages // 2 if schedule.startswith("interleaved") else num_stages
    step = alpa_meta.parallelize(
        model.train_step,
        cluster=f"host:{num_devices}",
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        recompute="none",
        exact=False,
        cache=False,
    )
    step.lower(model.state, model.batch)
    found, needed = held_memory(step.executable), stage_dp.device_bytes(step.plan.stage_plan)
    for one, planned in zip(found, needed, strict=False):  # that of all stages of a mesh
        yield (
            f"{planned / 1e6:.0f}, {one.buffer_bytes / 1e6:.0f}, {one.peak_bytes / 1e6:.0f}, "
            f"{planned / one.peak_bytes - 1:+.0%} ({one.task})"
        )


def print_held(models: Iterable[str], stages: Iterable[int], console: Console) -> None:
    """Print one line for each model, number of stages and schedule."""
    console.print("model stages schedule: MB per stage planned, buffers, with temporaries, ratio")
    for name, num_stages, schedule in product(models, stages, SCHEDULES):
        try:
            told = "; ".join(held(MODELS[name](), num_stages, schedule))
        except alpa_meta.PlanError as error:
            told = str(error)
        console.print(f"{name} {num_stages} {schedule}: {told}")


def main() -> None:
    """Print one line for each model, cluster, number of stages, kind and stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--cluster", action="append")
    parser.add_argument("--stages", action="append", type=int)
    parser.add_argument("--recompute", action="append", choices=KINDS)
    parser.add_argument("--held", action="store_true")
    given = parser.parse_args()
    if given.held:
        stages = given.stages or (2, 4)
        print_held(given.model or ("gpt", "llama", "moe"), stages, Console(soft_wrap=True))
        return
    gpus = ["h100:2"] if find_spec("jax_cuda12_plugin") else []
    console = Console(highlight=False, soft_wrap=True)
    console.print("model cluster stages recompute task: planned MB, compiled MB, ratio")
    for name, cluster, num_stages, kind in product(
        given.model or MODELS,
        given.cluster or ["host:2", *gpus],
        given.stages or (1, 2),
        given.recompute or KINDS,
    ):
        try:
            for one in found(MODELS[name](), cluster, num_stages, kind):
                console.print(
                    f"{name} {cluster} {num_stages} {kind} {one.task}: {one.planned / 1e6:.0f}, "
                    f"{one.compiled / 1e6:.0f}, {one.compiled / one.planned:.2f}"
                )
        except alpa_meta.PlanError as error:
            console.print(f"{name} {cluster} {num_stages} {kind}: {error}")


if __name__ == "__main__":
    main()
