"""Prints how long the searches of stage-dp take and how good their answers are.

    python benchmarks/stage_dp_search.py [joint] [small] [stages] [strategies] [tokens] [layers]

Seconds are CPU time of this process. All problems are synthetic and say so, but for tokens, whose
cases are settings of the TeraPipe paper (ICML'21) rebuilt from their published latencies.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np

import stage_dp
from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageCandidate, StageProblem
from stage_dp import joint_search

GB = 1e9


def stage_problem(num_layers: int, num_hosts: int, memory: float, schedules: tuple[str, ...]):
    """Return a transformer-like problem: up to 7 submeshes, 2 shardings each, 64 microbatches.

    Layers differ by up to 10 %; larger submeshes lose 5 % per doubling and 15 % across hosts; the
    second sharding keeps less and is 3 % slower. Lower bounds are the times themselves.
    """
    rng = random.Random(0)
    work = [rng.uniform(0.9, 1.1) for _ in range(num_layers)]
    shapes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]
    candidates = []
    for start, stop in itertools.combinations(range(num_layers + 1), 2):
        total = sum(work[start:stop])
        for hosts, devices in shapes:
            if hosts > num_hosts:
                continue
            n = hosts * devices
            efficiency = 0.95 ** np.log2(n) * (0.85 if hosts > 1 else 1.0)
            for lean in (False, True):
                seconds = total / n / efficiency / (0.97 if lean else 1.0)
                candidates.append(
                    StageCandidate(
                        layer_start=start,
                        layer_stop=stop,
                        submesh=SubmeshSpec(num_hosts=hosts, devices_per_host=devices),
                        logical=LogicalMesh(axes=(MeshAxis(name="data", size=n),)),
                        num_microbatches=64,
                        forward_seconds=seconds / 3,
                        backward_seconds=2 * seconds / 3,
                        step_seconds=0.05 * total,
                        state_bytes=16 * GB * total / n * (1.0 if lean else 1.4),
                        activation_bytes=1.5 * GB * total / n * (0.6 if lean else 1.0),
                        boundary_seconds=0.01,
                        lower_bound_seconds=seconds,
                    )
                )
    return StageProblem(
        num_layers=num_layers,
        device_groups=(DeviceGroup(num_hosts=num_hosts, devices_per_host=8, memory=memory),),
        candidates=tuple(candidates),
        schedules=schedules,
    )


def show_stages() -> None:
    """Print the stage construction table."""
    print("\nStage construction, 64 microbatches, synthetic transformer-like costs")
    print("layers devices candidates  memory  schedules             CPU s  stages   step s   gap")
    every = ("gpipe", "1f1b", "eager-1f1b", "adaptive")
    for layers, hosts, memory, schedules in [
        (16, 2, 80 * GB, ("1f1b",)),
        (32, 4, 80 * GB, ("1f1b",)),
        (64, 8, 80 * GB, ("1f1b",)),
        (64, 8, 30 * GB, ("1f1b",)),
        (64, 8, 22 * GB, ("1f1b",)),
        (64, 8, 80 * GB, every),
    ]:
        problem = stage_problem(layers, hosts, memory, schedules)
        start = time.process_time()
        plan = stage_dp.solve_stages(problem)
        seconds = time.process_time() - start
        names = schedules[0] if len(schedules) == 1 else f"{len(schedules)}, {plan.schedule} won"
        print(
            f"{layers:6d} {hosts * 8:7d} {len(problem.candidates):10d} {memory / GB:4.0f} GB  "
            f"{names:20s} {seconds:6.2f} {len(plan.stages):7d} {plan.step_seconds:8.2f} "
            f"{plan.gap:6.1%}"
        )


def strategy_problem(num_layers: int, memory: float, stages: int = 1) -> JointProblem:
    """Return 8 devices per stage, data/sharded-data/tensor parallelism with or without
    recomputation, 8 microbatches.

    Made from Galvatron's cost formulas with round numbers for an encoder layer of hidden size 1280.
    """
    rows = []
    for tensor, sharded, again in itertools.product((1, 2, 4, 8), (False, True), (False, True)):
        data = 8 // tensor
        if sharded and data == 1:
            continue
        forward = 0.02 * (1 + 0.05 * (tensor - 1))
        gather = 0.0 if data == 1 else 0.004 / tensor * (data - 1) / data
        layout = tensor.bit_length() - 1
        rows.append(
            LayerRow(
                forward=Affine(forward + gather * sharded),
                backward_input=Affine(2 * forward + forward * again + gather * sharded),
                step_seconds=2 * gather,
                state_bytes=320e6 / tensor / (data if sharded else 1),
                activation_bytes=Affine((60e6 if again else 330e6) * (0.4 + 0.6 / tensor) / data),
                layout_in=layout,
                layout_out=layout,
                recomputation="full" if again else "none",
                key=f"tp{tensor}-dp{data}{'-sharded' * sharded}{'-again' * again}",
            )
        )
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=8),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=8),)),
        rows=(tuple(rows),),
        layouts=("tp1", "tp2", "tp4", "tp8"),
        conversion={pair: Affine(0.0013) for pair in itertools.permutations(range(4), 2)},
    )
    return JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * num_layers, meshes=(mesh,)),
        batch_size=8,
        counts=(8,),
        device_groups=(DeviceGroup(num_hosts=stages, devices_per_host=8, memory=memory),),
        boundary=lambda a, y, b, x, link: Affine(0.001),
        schedules=("1f1b",),
        num_stages=stages,
    )


def on_a_grid(problem: JointProblem, grid: float) -> float:
    """Return the step of one stage by Galvatron's recurrence, bytes rounded up to `grid`."""
    (mesh,), count = problem.menu.meshes, problem.batch_size
    rows = mesh.rows[0]
    seconds = np.array(
        [r.forward.fixed + r.backward_input.fixed + r.step_seconds / count for r in rows]
    )
    need = [int(np.ceil((r.state_bytes + r.activation_bytes.fixed) / grid)) for r in rows]
    change = np.array([[mesh.convert(a.layout_out, b.layout_in, 1) for b in rows] for a in rows])
    cells = int(problem.device_groups[0].memory // grid) + 1
    value = np.zeros((cells, len(rows)))
    for number in range(problem.menu.num_layers):
        reached = (value[:, :, None] + change[None]).min(axis=1) if number else value
        value = np.full((cells, len(rows)), np.inf)
        for s, cells_needed in enumerate(need):
            value[cells_needed:, s] = reached[: cells - cells_needed, s] + seconds[s]
    return count * float(value[-1].min())


def show_strategies() -> None:
    """Print the table of strategies per layer."""
    print("\nStrategies per layer on 8 devices, 14 to choose from, against Galvatron's recurrence")
    print("on a 1 MB grid")
    print("layers memory   joint s  grid s    gap   joint CPU s  grid CPU s  strategies used")
    for layers, memory in [(32, 6 * GB), (32, 8 * GB), (48, 8 * GB), (96, 16 * GB)]:
        problem = strategy_problem(layers, memory)
        start = time.process_time()
        plan = stage_dp.solve_joint(problem)
        middle = time.process_time()
        coarse = on_a_grid(problem, 1e6)
        stop = time.process_time()
        used = Counter(problem.menu.meshes[0].rows[0][row].key for row in plan.stages[0].rows)
        print(
            f"{layers:6d} {memory / GB:3.0f} GB {plan.step_seconds:9.4f} {coarse:8.4f} "
            f"{plan.gap:6.2%} {middle - start:12.3f} {stop - middle:11.3f}  "
            + ", ".join(f"{count} x {name}" for name, count in used.items())
        )
    start = time.process_time()
    plan = stage_dp.solve_joint(strategy_problem(32, 3 * GB, stages=4))
    seconds = time.process_time() - start
    sizes = [stage.layer_stop - stage.layer_start for stage in plan.stages]
    print(
        f"partition and strategies together, 32 layers on 4 stages of 8 devices with 3 GB: layers "
        f"{sizes}, step {plan.step_seconds:.3f} s, gap {plan.gap:.1%}, {seconds:.2f} CPU s"
    )


TERAPIPE = {
    # setting: layers, hidden, tokens, samples, tensor parallel, stages, seconds of a layer at least
    # and per flop, s without slices, s of the slices that TeraPipe's own program finds
    "175B/10": (96, 12288, 2048, 2, 8, 48, 3.82416483e-3, 1.37803128e-14, 5.822, 1.1600),
    "44B/8": (96, 6144, 2048, 8, 8, 48, 1.92523973e-3, 1.92823212e-14, 2.662, 1.0520),
    "44B/6": (96, 6144, 2048, 2, 1, 96, 4.10715666e-2, 1.36177988e-14, 13.319, 5.8369),
    "1B/1": (24, 2048, 2048, 16, 1, 24, 7.07430050e-3, 3.64967942e-14, 1.517, 1.2319),
    "13B, 4096": (40, 5120, 4096, 8, 8, 40, 1.55553174e-3, 2.16185815e-14, 2.4532, 0.78177),
    "13B, 8192": (40, 5120, 8192, 2, 8, 40, 1.55553174e-3, 2.16185815e-14, 4.4398, 0.49954),
    "1B, 5 ms": (24, 2048, 2048, 16, 8, 24, 5e-3, 2e-14, 0.47941, 0.47717),
}


def token_problem(case: str) -> stage_dp.TokenProblem:
    """Return a setting; a layer takes at least a floor, else flops at a rate (the last setting is
    synthetic), and a slice is sent there and back at 25 Gb/s."""
    layers, hidden, length, samples, tensor, stages, floor, rate, *_ = TERAPIPE[case]
    cells = np.arange(length // 8 + 1) * 8
    start, stop = np.meshgrid(cells, cells, indexing="ij")
    tokens = np.maximum(stop - start, 0)
    flops = 3 * tokens * (24 * hidden**2 + 4 * hidden * stop) / tensor
    each = layers // stages
    sizes = np.arange(1, samples + 1)[:, None, None]
    sent = 60e-6 + sizes * tokens * hidden * 2 / 3.125e9
    return stage_dp.TokenProblem(
        seconds=each * (floor + rate * sizes * flops) + 2 * sent,
        num_samples=samples,
        stage_scale=(1.0,) * stages,
        tokens_per_cell=8,
    )


def show_tokens() -> None:
    """Print the token slicing table."""
    print("\nToken slicing, TeraPipe's settings, against its own program's dynamic program")
    print("setting    no slices s  TeraPipe s    here s  slices   bound s   CPU s")
    for case, (*_, whole, sliced) in TERAPIPE.items():
        problem = token_problem(case)
        start = time.process_time()
        plan = stage_dp.slice_tokens(problem)
        seconds = time.process_time() - start
        print(
            f"{case:10s} {whole:11.4f} {sliced:11.4f} {plan.step_seconds:9.4f} "
            f"{len(plan.groups[0][1]):7d} {plan.lower_bound:9.4f} {seconds:7.3f}"
        )


def transformer(num_blocks: int) -> stage_dp.OpSequence:
    """Return a transformer of 40 ops per block with an embedding before and a head behind."""
    flops, operands, results, signatures = [], [], [], []
    sizes: dict[int, float] = {}

    def add(name, reads, size, work=0.0):
        value = len(sizes)
        sizes[value] = size
        flops.append(work)
        operands.append(tuple(reads))
        results.append((value,))
        signatures.append((name, size))
        return value

    x = add("embed", [], 1.0)
    for _ in range(num_blocks):
        h = x
        for k in range(38):
            h = add(f"op{k}", [h], 3.0, 4.0 if k % 8 == 0 else 0.0)
        x = add("residual", [x, h], 1.0)
    add("head", [x], 10.0, 10.0)
    return stage_dp.OpSequence(
        seconds=flops, operands=operands, results=results, value_bytes=sizes, signatures=signatures
    )


def show_layers() -> None:
    """Print the layer clustering table."""
    print("\nLayer clustering, transformers of 39 ops per block")
    print("blocks    ops  layers  classes   CPU s")
    for blocks in (12, 48, 96):
        ops = transformer(blocks)
        start = time.process_time()
        layers = stage_dp.cluster_layers(ops)
        seconds = time.process_time() - start
        classes = len(set(layers.equivalence_classes))
        print(
            f"{blocks:6d} {len(ops.seconds):6d} {layers.num_layers:7d} {classes:8d} {seconds:7.2f}"
        )


def joint_problem(
    num_layers: int, num_hosts: int, memory: float, batch_size: int = 1024, *, scale: float = 1.0
) -> JointProblem:
    """Return a transformer with an embedding, blocks and a head on hosts of 8 devices.

    A device does 1e14 flop/s of a block of 1.2e9 parameters / `scale` and 2048 tokens per sample;
    8 rows per class: tensor parallel or not within the mesh's inner axis x sharded state or not x
    recomputation or not. Links: 200 GB/s in a host, 25 GB/s between hosts.
    """
    classes = {"embed": (0.05, 0.4), "block": (1.0, 1.0), "head": (0.6, 0.4)}
    sizes = [(1, 1), (1, 2), (1, 4), (1, 8)]
    hosts = 2
    while hosts <= num_hosts:
        sizes.append((hosts, 8))
        hosts *= 2
    meshes = []
    for hosts, devices in sizes:
        total = hosts * devices
        for tensor in (1, 2, 4, 8):
            if tensor > devices or total // tensor > batch_size:
                continue
            data = total // tensor
            slow = 25e9 if hosts > 1 else 200e9
            rows = []
            for work, weight in classes.values():
                own = []
                for sharded, again, split in itertools.product((0, 1), (0, 1), (0, 1)):
                    parameters = 1.2e9 / scale * weight
                    flops = 2 * 1.2e9 / scale * work * 2048 / 1e14 / total
                    exchange = 4 * 2048 * 8192 * 2 * (tensor - 1) / tensor / 200e9 / data
                    exchange *= 0.7 if split else 1.0
                    gather = 2 * parameters / tensor * (data - 1) / data / slow
                    kept = 34 * 2048 * 8192 / scale**0.5 * (0.4 + 0.6 / tensor) / data
                    kept *= 0.8 if split else 1.0
                    own.append(
                        LayerRow(
                            forward=Affine(2e-5 + gather * sharded, flops + exchange),
                            backward_input=Affine(
                                4e-5 + gather * sharded,
                                flops * (1 + again) * (1.03 if split else 1.0) + exchange,
                            ),
                            backward_weight=Affine(0.0, flops),
                            step_seconds=2 * gather + 16 * parameters / tensor / 2e12,
                            state_bytes=16 * parameters / tensor / (data if sharded else 1),
                            activation_bytes=Affine(0.0, kept * (0.12 if again else 1.0) * work),
                            transient_bytes=Affine(0.0, 0.3 * kept),
                            batch_split=data,
                        )
                    )
                rows.append(tuple(own))
            meshes.append(
                MeshMenu(
                    submesh=SubmeshSpec(num_hosts=hosts, devices_per_host=devices),
                    logical=LogicalMesh(
                        axes=(MeshAxis(name="data", size=data), MeshAxis(name="model", size=tensor))
                    ),
                    rows=tuple(rows),
                )
            )
    each = {"host": 2048 * 8192 * 2 / 200e9, "hosts": 2048 * 8192 * 2 / 25e9, "groups": 1e-3}
    return JointProblem(
        menu=LayerMenu(class_of_layer=(0, *(1,) * (num_layers - 2), 2), meshes=tuple(meshes)),
        batch_size=batch_size,
        device_groups=(DeviceGroup(num_hosts=num_hosts, devices_per_host=8, memory=memory),),
        boundary=lambda a, y, b, x, link: Affine(1e-5, each[link]),
    )


JOINT = {
    # layers, hosts, bytes per device, batch, parameters of a block down by
    "48 layers, 64 devices, 80 GB": (48, 8, 80 * GB, 1024, 2.5),
    "48 layers, 64 devices, 32 GB": (48, 8, 32 * GB, 1024, 2.5),
    "96 layers, 64 devices, 80 GB": (96, 8, 80 * GB, 1024, 5.0),
    "96 layers, 64 devices, 24 GB": (96, 8, 24 * GB, 1024, 5.0),
    "96 layers, 1024 devices, 80 GB": (96, 128, 80 * GB, 2048, 0.7),
    "96 layers, 1024 devices, 32 GB": (96, 128, 32 * GB, 2048, 0.7),
    "96 layers, 4096 devices, 80 GB": (96, 512, 80 * GB, 4096, 0.5),
}


def show_joint() -> None:
    """Print the joint search table."""
    print("\nJoint search, synthetic transformers, 8 rows per class, all counts, six schedules")
    columns = "meshes  CPU s  stages  count  schedule         step s    gap"
    print(f"{'problem':32s} {columns}")
    for name, (layers, hosts, memory, batch, scale) in JOINT.items():
        problem = joint_problem(layers, hosts, memory, batch, scale=scale)
        start = time.process_time()
        plan = stage_dp.solve_joint(problem)
        seconds = time.process_time() - start
        print(
            f"{name:32s} {len(problem.menu.meshes):6d} {seconds:6.2f} {len(plan.stages):7d} "
            f"{plan.num_microbatches:6d}  {plan.schedule:16s} {plan.step_seconds:8.3f} "
            f"{plan.gap:6.2%}",
            flush=True,
        )


def against_all(module: ModuleType, seeds: int) -> tuple[int, int, float, int]:
    """Return the problems of a test module that have a plan, how many of our plans are the best of
    all pipelines, the worst one's share above it, and how many are proven to be it."""
    found, proven = [], 0
    for seed in range(seeds):
        problem = module.random_problem(seed)
        best = module.brute_force(problem)
        if math.isfinite(best):
            plan = stage_dp.solve_joint(problem)
            found.append(plan.step_seconds / best - 1)
            proven += plan.gap < 1e-9
    return len(found), sum(above < 1e-9 for above in found), max(found), proven


def show_small() -> None:
    """Print how many plans of tiny problems are the best of all pipelines."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/stage-dp/tests"))
    import test_joint_interleaved
    import test_joint_search

    print("\nTiny random problems against all their pipelines")
    print("problems                                      with a plan  best  worst above  proven")
    enumerated = joint_search.ENUMERATED_LAYERS
    for name, module, seeds, layers in [
        ("2-4 layers, five schedules", test_joint_search, 160, enumerated),
        ("the same, without trying all pipelines", test_joint_search, 160, 0),
        ("4-6 layers, interleaved", test_joint_interleaved, 24, enumerated),
    ]:
        joint_search.ENUMERATED_LAYERS = layers
        plans, best, worst, proven = against_all(module, seeds)
        print(f"{name:45s} {plans:11d} {best:5d} {worst:12.2%} {proven:7d}", flush=True)
    joint_search.ENUMERATED_LAYERS = enumerated


PARTS = {
    "joint": show_joint,
    "small": show_small,
    "stages": show_stages,
    "strategies": show_strategies,
    "tokens": show_tokens,
    "layers": show_layers,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
