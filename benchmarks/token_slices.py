"""Token slices: the paper's settings predicted, and pipelines executed here.

    .venv/bin/python benchmarks/token_slices.py [published] [executed]

published: speed-ups of TeraPipe's evaluation (GPT-3 models on V100, sequences of one batch along a
pipeline), as published and as predicted from the traced block's operators by the cost model: every
slice priced on its rows and keys, cut by `stage_dp.slice_tokens`; CPU seconds of each.
executed: `examples/long_context.py` in whole sequences and in slices, in one process: seconds of a
step predicted and measured, and per stage the bytes planned beside those of the fullest task as XLA
compiled it, which holds its own slice, with what other slices keep counted in the plan alone.
"""

from __future__ import annotations

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

import stage_dp
from alpa_meta.inter_op.layer_work import one_device
from alpa_meta.step.program import Step
from alpa_meta.token_slices.analysis import analysed
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.slice_seconds import slice_seconds
from cost_model import cluster

# setting: layers, hidden, heads, tokens, samples, tensor parallel, stages, published seconds of a
# step without slices and with them (Li et al. 2021, figure 5 and table of the appendix)
PUBLISHED = {
    "175B/10": (96, 12288, 96, 2048, 2, 8, 48, 5.822, 1.160),
    "44B/8": (96, 6144, 48, 2048, 8, 8, 48, 2.662, 1.111),
    "44B/6": (96, 6144, 48, 2048, 2, 1, 96, 13.319, 7.103),
    "1B/1": (24, 2048, 16, 2048, 16, 1, 24, 1.517, 1.254),
    "13B, 4096": (40, 5120, 40, 4096, 8, 8, 40, 2.526, 0.913),
    "13B, 8192": (40, 5120, 40, 8192, 2, 8, 40, 4.978, 0.636),
}
CELLS = 64
LATENCY, BANDWIDTH = 60e-6, 3.125e9  # between hosts of the paper, 25 Gb/s


def block_seconds(hidden: int, heads: int, tokens: int, tensor: int) -> np.ndarray:
    """Return [positions, positions] seconds of a layer for cells of one sequence on V100, each of
    `tensor` devices doing its part of the operators."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float16)

    layer = {
        "qkv": shape(hidden, 3 * hidden),
        "out": shape(hidden, hidden),
        "up": shape(hidden, 4 * hidden),
        "down": shape(4 * hidden, hidden),
    }

    def step(layer, x):
        def loss(layer, x):
            return long_context.block(layer, x, heads).astype(jnp.float32).sum()

        return jax.grad(loss)(layer, x), jax.grad(loss, argnums=1)(layer, x)

    program = Step(step, (layer, shape(1, tokens, hidden)), batch_argnums=(1,)).program(1)
    holds = [leaf.role == "batch" for leaf in program.inputs]
    halves = Slices((tokens // 2, tokens // 2))
    analysis = analysed(program.closed, program.phases.of_eqn, holds, halves)
    return slice_seconds(analysis, one_device(cluster("v100-16gb:1x1")), CELLS) / tensor


def published() -> None:
    """Print the predicted speed-ups beside the published ones."""
    print("setting      published: s, s, speed-up   predicted: s, s, speed-up   slices   CPU s")
    for name, setting in PUBLISHED.items():
        layers, hidden, heads, tokens, samples, tensor, stages, *seconds = setting
        start = time.process_time()
        table = layers // stages * block_seconds(hidden, heads, tokens, tensor)
        traced = time.process_time() - start
        positions = np.arange(CELLS + 1) * tokens // CELLS
        sent = LATENCY + np.maximum(positions - positions[:, None], 0) * hidden * 2 / BANDWIDTH
        sizes = np.arange(1, samples + 1)[:, None, None]
        problem = stage_dp.TokenProblem(
            seconds=sizes * (table + 2 * (sent - LATENCY)) + 2 * LATENCY,
            num_samples=samples,
            stage_scale=(1.0,) * stages,
            tokens_per_cell=tokens // CELLS,
        )
        start = time.process_time()
        plan = stage_dp.slice_tokens(problem)
        took = time.process_time() - start
        whole = (samples + stages - 1) * float(problem.seconds[0, 0, -1])
        count = sum(len(cut) for _, cut in plan.groups)
        print(
            f"{name:10s} {seconds[0]:9.3f} {seconds[1]:6.3f} {seconds[0] / seconds[1]:6.2f} x   "
            f"{whole:9.3f} {plan.step_seconds:6.3f} {whole / plan.step_seconds:6.2f} x   "
            f"{count:6d}   {traced:.2f} + {took:.3f}"
        )


def executed() -> None:
    """Print the steps of pipelines of two and four stages, in whole sequences and in slices."""
    print("stages, slices: predicted s, measured s; MB per stage planned, compiled")
    for num_stages, asked in ((2, (1, 4, None)), (4, (1, 4))):
        runs = {
            slices: long_context.pipeline(num_stages, num_token_slices=slices) for slices in asked
        }
        found = long_context.losses_and_seconds(runs)
        for slices, step in runs.items():
            plan, seconds = step.plan, found[slices][1]
            lengths = plan.program.token_slices or "whole"
            told = "chosen" if slices is None else "asked for"
            memory = step.executable.audit().memory
            held = []
            for stage in range(num_stages):
                tasks = [one for name, one in memory.items() if name.split(".")[1] == str(stage)]
                compiled = max(one.peak_bytes for one in tasks)
                held.append(f"{plan.stage_plan.peak_bytes[stage] / 1e6:.0f}, {compiled / 1e6:.0f}")
            print(
                f"{num_stages}, {lengths} ({told}): {plan.step_seconds:.3f}, {seconds:.3f}; "
                f"{'; '.join(held)}",
                flush=True,
            )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ("published", "executed"):
        {"published": published, "executed": executed}[chosen]()
