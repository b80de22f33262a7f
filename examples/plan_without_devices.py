"""Plans a GPT of 1.3 billion parameters for 16 H100s on any machine, from shapes only.

Run with: python examples/plan_without_devices.py
"""

import jax
import jax.numpy as jnp

import alpa_meta as alpa
from alpa_meta.trainer.model import GptOptions
from alpa_meta.trainer.step import OptimiserOptions, make_optimiser, make_state_maker, train_step

model = GptOptions(num_layers=24, hidden=2048, num_heads=16, context=1024, dtype="bfloat16")
make_state = make_state_maker(model, make_optimiser(OptimiserOptions()))
state = jax.eval_shape(make_state, jax.random.key(0))
tokens = jax.ShapeDtypeStruct((64, model.context), jnp.int32)


def show(what, done, total):
    print(f"{what}: {done} of {total}", flush=True)


step = alpa.parallelize(train_step, cluster="h100:16", progress=show)
print(step.plan_for(state, {"inputs": tokens, "targets": tokens}))
