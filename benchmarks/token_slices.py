"""Token slices: the paper's settings predicted, and pipelines executed here.

    .venv/bin/python benchmarks/token_slices.py [published] [executed] [corpus [MODEL ...]]

published: speed-ups of TeraPipe's evaluation (GPT-3 models on V100, sequences of one batch along a
pipeline), as published and as predicted from the traced block's operators by the cost model: every
slice priced on its rows and keys and with the all-reduces of tensor parallelism, gradients reduced
among replicas, cut by `stage_dp.slice_tokens`; CPU seconds of each.
executed: `examples/long_context.py` in whole sequences and in slices, in one process: seconds of a
step predicted and measured, and per stage the bytes planned beside those held over the schedule:
buffers alone, and with the temporaries of XLA's compiled programs (on host devices these have
copies that matrix products want laid out otherwise, which the plan does not count).
corpus: every corpus model in 2 and 3 uneven slices, in two stages on four host devices: one step is
run and compared with one device's, and every slice's program audited; the others' refusals.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import long_context
import numpy as np

import alpa_meta
import stage_dp
from alpa_interchange import SubmeshSpec
from alpa_meta.audit.held_memory import held_memory
from alpa_meta.audit.planner_plans import reference_of
from alpa_meta.corpus import NAMES, build
from alpa_meta.inter_op.layer_work import one_device
from alpa_meta.step.program import Step
from alpa_meta.token_slices.analysis import analysed
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.slice_seconds import slice_seconds
from cost_model import CostModel, cluster

# setting: layers, hidden, heads, tokens, samples of a replica, tensor parallel, stages, replicas,
# published seconds of a step without slices and with them (Li et al. 2021, figure 5 and table of
# the appendix)
PUBLISHED = {
    "175B/10": (96, 12288, 96, 2048, 2, 8, 48, 1, 5.822, 1.160),
    "44B/8": (96, 6144, 48, 2048, 8, 8, 48, 1, 2.662, 1.111),
    "44B/6": (96, 6144, 48, 2048, 2, 1, 96, 4, 13.319, 7.103),
    "1B/1": (24, 2048, 16, 2048, 16, 1, 24, 8, 1.517, 1.254),
    "13B, 4096": (40, 5120, 40, 4096, 8, 8, 40, 1, 2.526, 0.913),
    "13B, 8192": (40, 5120, 40, 8192, 2, 8, 40, 1, 4.978, 0.636),
}
HOST = "p3.16xlarge"  # of the paper: eight V100, 25 Gb/s between hosts
UNEVEN = ((9, 7), (5, 1, 10))  # of the corpus models' 16 tokens
CELLS = 64
LATENCY, BANDWIDTH = 60e-6, 3.125e9  # between stages on two hosts


def block_seconds(hidden: int, heads: int, tokens: int, tensor: int) -> np.ndarray:
    """Return [positions, positions] seconds of a layer for cells of one sequence on V100: a
    device's part of the heads and of the inner layer, and two all-reduces forward and backward."""
    inner, heads = hidden // tensor, heads // tensor

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float16)

    layer = {
        "qkv": shape(hidden, 3 * inner),
        "out": shape(inner, hidden),
        "up": shape(hidden, 4 * inner),
        "down": shape(4 * inner, hidden),
    }

    def step(layer, x):
        def loss(layer, x):
            return block(layer, x, heads).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1))(layer, x)

    program = Step(step, (layer, shape(1, tokens, hidden)), batch_argnums=(1,)).program(1)
    holds = [leaf.role == "batch" for leaf in program.inputs]
    halves = Slices((tokens // 2, tokens // 2))
    analysis = analysed(program.closed, program.phases.of_eqn, holds, halves)
    table = slice_seconds(analysis, one_device(cluster(f"{HOST}:1x1")), CELLS)
    if tensor > 1:
        positions = np.arange(CELLS + 1) * tokens // CELLS
        rows = np.maximum(positions - positions[:, None], 0)
        reduced = {
            count: reduce_seconds(count * hidden * 2.0, 1, tensor) for count in np.unique(rows)
        }
        table = table + 4 * np.vectorize(reduced.__getitem__)(rows)
    return table


def block(layer, x, heads):
    """Return what `long_context.block` does, with a device's part of the heads."""
    parts = jnp.split(long_context.normed(x) @ layer["qkv"], 3, axis=-1)
    queries, keys, values = (part.reshape(*x.shape[:2], heads, -1) for part in parts)
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    x = x + mixed.reshape(*x.shape[:2], -1) @ layer["out"]
    return x + jax.nn.gelu(long_context.normed(x) @ layer["up"]) @ layer["down"]


@functools.cache
def reduce_seconds(size: float, hosts: int, devices: int) -> float:
    """Return the seconds of an all-reduce among `devices` of a host, or of one of the eight
    devices of each of several hosts."""
    model = CostModel(cluster(f"{HOST}:{hosts}x{devices}"))
    mesh = model.logical_mesh(
        SubmeshSpec(num_hosts=hosts, devices_per_host=devices), (hosts, devices), ("h", "d")
    )
    return float(model.collective_seconds("all-reduce", size, (mesh.axes[0 if hosts > 1 else 1],)))


def published() -> None:
    """Print the predicted speed-ups beside the published ones."""
    print("setting      published: s, s, speed-up   predicted: s, s, speed-up   slices   CPU s")
    for name, setting in PUBLISHED.items():
        layers, hidden, heads, tokens, samples, tensor, stages, replicas, *seconds = setting
        start = time.process_time()
        table = layers // stages * block_seconds(hidden, heads, tokens, tensor)
        traced = time.process_time() - start
        positions = np.arange(CELLS + 1) * tokens // CELLS
        sent = LATENCY + np.maximum(positions - positions[:, None], 0) * hidden * 2 / BANDWIDTH
        sizes = np.arange(1, samples + 1)[:, None, None]
        gradients = layers // stages * 12.0 * hidden**2 * 2 / tensor
        once = reduce_seconds(gradients, replicas, 8) if replicas > 1 else 0.0
        problem = stage_dp.TokenProblem(
            seconds=sizes * (table + 2 * (sent - LATENCY)) + 2 * LATENCY,
            num_samples=samples,
            stage_scale=(1.0,) * stages,
            tokens_per_cell=tokens // CELLS,
            step_seconds=once,
        )
        start = time.process_time()
        plan = stage_dp.slice_tokens(problem)
        took = time.process_time() - start
        whole = (samples + stages - 1) * float(problem.seconds[0, 0, -1]) + once
        count = sum(len(cut) for _, cut in plan.groups)
        print(
            f"{name:10s} {seconds[0]:9.3f} {seconds[1]:6.3f} {seconds[0] / seconds[1]:6.2f} x   "
            f"{whole:9.3f} {plan.step_seconds:6.3f} {whole / plan.step_seconds:6.2f} x   "
            f"{count:6d}   {traced:.2f} + {took:.3f}"
        )


def executed() -> None:
    """Print the steps of pipelines of two and four stages, in whole sequences and in slices."""
    print("stages, slices: predicted s, measured s; MB per stage planned, held, with temporaries")
    for num_stages, asked in ((2, (1, 4, None)), (4, (1, 4))):
        runs = {
            slices: long_context.pipeline(num_stages, num_token_slices=slices) for slices in asked
        }
        found = long_context.losses_and_seconds(runs)
        for slices, step in runs.items():
            plan, seconds = step.plan, found[slices][1]
            lengths = plan.program.token_slices or "whole"
            told = "chosen" if slices is None else "asked for"
            memory = zip(plan.stage_plan.peak_bytes, held_memory(step.executable), strict=True)
            held = [
                f"{planned / 1e6:.0f}, {one.buffer_bytes / 1e6:.0f}, {one.peak_bytes / 1e6:.0f}"
                for planned, one in memory
            ]
            print(
                f"{num_stages}, {lengths} ({told}): {plan.step_seconds:.3f}, {seconds:.3f}; "
                f"{'; '.join(held)}",
                flush=True,
            )


def corpus(names: tuple[str, ...]) -> None:
    """Print for each corpus model the audit of its slices, or why it is not cut."""
    print("model, slices: programs of slices audited, worst difference of what is allowed, CPU s")
    for name in names or NAMES:
        model, reference = build(name), None
        for lengths in UNEVEN:
            start = time.process_time()
            step = alpa_meta.parallelize(
                model.train_step,
                cluster="host:4",
                cache=False,
                num_stages=2,
                num_microbatches=1,
                token_slices=lengths,
            )
            try:
                step.lower(*model.arguments())
            except alpa_meta.PlanError as error:
                print(f"{name}: refused: {error}", flush=True)
                break
            reference = reference or reference_of(model)
            audit = step.audit(*model.arguments(), reference=reference)
            assert audit.numerics is not None
            worst = audit.numerics.worst
            print(
                f"{name}, {lengths}: {'ok' if audit.ok else 'FAILED'}, {len(audit.tasks)}, "
                f"{worst.ulps:.0f} of {worst.allowed_ulps:.0f} ulps, "
                f"{time.process_time() - start:.0f}",
                flush=True,
            )
        jax.clear_caches()


if __name__ == "__main__":
    asked = sys.argv[1:] or ["published", "executed"]
    if asked[0] == "corpus":
        corpus(tuple(asked[1:]))
    else:
        for chosen in asked:
            {"published": published, "executed": executed}[chosen]()
