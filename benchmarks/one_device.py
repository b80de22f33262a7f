"""Training steps on the accelerator that is here: seconds and memory planned and measured.

    python benchmarks/one_device.py [--model gpt-350m:batch=16 ...] [--steps 20] [--out FILE]

Each model runs in a process of its own, one after another, under the plan that `parallelize` makes
for one device of this process, and as `jax.jit` runs it with its state donated. Printed are the
seconds of a step as planned and as measured (the median of turns of `--steps` steps), over those of
`jax.jit`, the peak of the plan, of the compiled program (`memory_analysis`) and of the allocator,
and how far the losses are apart. A model is a name of the corpus (at size small, or as in gpt:tiny)
or of a published model, with fields of its shape to change. On host devices it runs two tiny ones
and says little: the processor is shared. Nothing is fitted on what is measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = (
    "gpt-125m:batch=32,dtype=bfloat16",
    "gpt-350m:batch=16,dtype=bfloat16",
    "gpt-1.3b:batch=8,num_layers=12,dtype=bfloat16",
    "llama-7b:batch=2,length=4096,num_layers=3,dtype=bfloat16",
    "moe-380m:batch=16,dtype=bfloat16",
    "wide-resnet-250m:batch=32",
    "gpt",
    "gpt-scan",
    "llama",
    "mamba",
    "vit",
    "unet",
    "dlrm",
    "t5",
)
ON_HOSTS = ("gpt:tiny", "mamba:tiny")
TURNS = 5
LIMIT = 120  # seconds that a model may take
COMPARED = 10
"""Steps whose losses are compared, from the same state on the same batch."""


def main() -> None:
    """Print a table of the models, or in a child the record of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="records, one in a line")
    parser.add_argument("--seconds", type=float, default=1e9, help="no model begins after these")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(record(given.one, given.steps)))
        return
    began = time.monotonic()
    print(HEADER, flush=True)
    for name in given.model or (ON_HOSTS if on_hosts() else MODELS):
        if time.monotonic() - began > given.seconds:
            print(f"{name}: no time was left")
            continue
        found = in_a_child(name, given.steps)
        print(found if isinstance(found, str) else line(found), flush=True)
        if given.out and not isinstance(found, str):
            with given.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


def on_hosts() -> bool:
    """Return whether jax finds host devices only; this process leaves accelerators to others."""
    asked = "import jax; print(jax.devices()[0].platform)"
    run = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    return run.stdout.strip() == "cpu"


def in_a_child(name: str, steps: int) -> dict[str, Any] | str:
    """Return the record of a model, or what its process said when it failed."""
    try:
        run = subprocess.run(
            [sys.executable, __file__, "--one", name, "--steps", str(steps)],
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"{name}: did not end in {LIMIT} s"
    if run.returncode:
        return f"{name}: FAILED\n{run.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def record(name: str, steps: int) -> dict[str, Any]:
    """Return what was planned and measured of one model."""
    import jax

    import alpa_meta as alpa

    # XLA takes minutes to compile threefry for the weights of a whole model on a GPU
    jax.config.update("jax_default_prng_impl", "rbg")
    device = jax.devices()[0]
    model = model_of(name)
    state, batch = model.arguments()
    shapes = jax.eval_shape(lambda: (state, batch))
    cluster = alpa.local_cluster()
    if cluster.num_devices > 1:
        raise SystemExit(f"{cluster.name} has more than one device; show this process one of them")
    step = alpa.parallelize(model.train_step, exact=model.exact, cache=False)

    began = time.monotonic()
    lowered = step.lower(*shapes)
    planned_in = time.monotonic() - began
    executable = lowered.compile()
    checks = executable.audit().memory.values()
    compiled_in = time.monotonic() - began - planned_in
    state, losses = trained(step, state, batch)
    measured, state = seconds(step, state, batch, steps)
    held = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    del state

    plain = jax.jit(model.train_step, donate_argnums=0)
    state, _ = model.arguments()
    state, expected = trained(plain, state, batch)
    alone, state = seconds(plain, state, batch, steps)
    analysis = plain.lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    both = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "model": name,
        "device": device.device_kind,
        "jax": jax.__version__,
        "cluster": cluster.name,
        "planned_seconds": lowered.plan.step_seconds,
        "seconds": measured,
        "plain_seconds": alone,
        "planned_bytes": max(check.predicted_peak_bytes or 0 for check in checks),
        "compiled_bytes": max(check.peak_bytes for check in checks),
        "held_bytes": held,
        "plain_bytes": analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0),
        "held_by_both": both,
        "num_microbatches": lowered.plan.num_microbatches,
        "loss_error": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "planning": planned_in,
        "compiling": compiled_in,
    }


def model_of(name: str) -> Any:
    """Return the model of a name with fields of its shape to change."""
    from alpa_meta.corpus import NAMES, build, published

    name, _, changed = name.partition(":")
    if name in NAMES:
        return build(name, changed or "small")
    fields = dict(one.split("=") for one in changed.split(",") if one)
    return published(name, **{k: int(v) if v.isdigit() else v for k, v in fields.items()})


def trained(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[float]]:
    """Return the state after the compared steps, and their losses."""
    losses = []
    for _ in range(COMPARED):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def seconds(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> tuple[float, Any]:
    """Return the seconds of a step, the median of turns of `steps` of them, and the state."""
    turns = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch)
        float(metrics["loss"])
        turns.append((time.perf_counter() - began) / steps)
    return statistics.median(turns), state


HEADER = (
    f"{'model':44} {'planned':>9} {'measured':>9} {'error':>7} {'/ jit':>6}   "
    f"{'planned':>8} {'compiled':>8} {'held':>8} {'error':>7}   losses apart"
)


def line(found: dict[str, Any]) -> str:
    """Return the line of a record."""
    planned, measured = found["planned_seconds"], found["seconds"]
    return (
        f"{found['model']:44} {planned * 1e3:6.2f} ms {measured * 1e3:6.2f} ms "
        f"{planned / measured - 1:+7.1%} {measured / found['plain_seconds']:6.3f}   "
        f"{found['planned_bytes'] / 1e9:5.2f} GB {found['compiled_bytes'] / 1e9:5.2f} GB "
        f"{found['held_bytes'] / 1e9:5.2f} GB "
        f"{found['planned_bytes'] / found['compiled_bytes'] - 1:+7.1%}   {found['loss_error']:.1e}"
    )


if __name__ == "__main__":
    main()
