"""Trains the bundled GPT as a pipeline of four stages and compares it with one device.

Run with: python examples/pipeline.py
"""

import jax
import numpy as np

import alpa_meta as alpa
from alpa_meta.trainer.model import GptOptions
from alpa_meta.trainer.step import OptimiserOptions, make_optimiser, make_state_maker, train_step

jax.config.update("jax_num_cpu_devices", 8)

model = GptOptions(num_layers=4, hidden=32, num_heads=4, context=64)
make_state = make_state_maker(model, make_optimiser(OptimiserOptions(schedule_steps=20)))
text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, dtype=np.uint8)


def batch_of(step):
    starts = np.random.default_rng(step).integers(0, len(text) - 65, size=16)
    windows = text[starts[:, None] + np.arange(65)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


options = alpa.Options(num_stages=4, num_microbatches=8, schedule="1f1b")
pipeline = alpa.parallelize(train_step, cluster="host:8", options=options)
one_device = jax.jit(train_step)

key = jax.random.key(0)
state, alone = pipeline.init(make_state, key), make_state(key)
for step in range(20):
    batch = batch_of(step)
    state, metrics = pipeline(state, batch)
    alone, expected = one_device(alone, batch)
    if step % 5 == 4:
        loss, other = float(metrics["loss"]), float(expected["loss"])
        print(f"step {step + 1:2d}: loss {loss:.4f}, on one device {other:.4f}")

for index, stage in enumerate(pipeline.plan.stage_plan.stages):
    layers = f"{stage.candidate.layer_start}..{stage.candidate.layer_stop - 1}"
    print(f"stage {index}: layers {layers} on devices {stage.device_ids}")
