"""Flash attention as Pallas kernels, forward and backward: without rules they run on whole arrays,
with rules they are cut over devices, microbatches, stages and tokens like jax's own.

Run with: python examples/own_kernel.py
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import alpa_meta as alpa
from alpa_interchange import ShardingRule

BLOCK = 4  # queries of one program, and keys read at a time


def scores(queries, keys, first_query, first_key):
    """Return the scaled products of a block of queries and of keys, none with later keys."""
    found = queries @ keys.T / jnp.sqrt(queries.shape[-1])
    place = functools.partial(jax.lax.broadcasted_iota, jnp.int32, found.shape)
    return jnp.where(place(0) + first_query >= place(1) + first_key, found, -1e30)


def forward_kernel(q_ref, k_ref, v_ref, out_ref, logsum_ref, *, before):
    """Keep a running maximum and sum, so that no [query, key] matrix is stored."""
    queries, first = q_ref[0, 0], before + pl.program_id(2) * BLOCK

    def block(number, carry):
        top, total, mixed = carry
        keys = pl.ds(number * BLOCK, BLOCK)
        found = scores(queries, k_ref[0, 0, keys, :], first, number * BLOCK)
        higher = jnp.maximum(top, found.max(1))
        weights, kept = jnp.exp(found - higher[:, None]), jnp.exp(top - higher)
        mixed = mixed * kept[:, None] + weights @ v_ref[0, 0, keys, :]
        return higher, total * kept + weights.sum(1), mixed

    start = (jnp.full(BLOCK, -1e30), jnp.zeros(BLOCK), jnp.zeros_like(queries))
    top, total, mixed = jax.lax.fori_loop(0, k_ref.shape[2] // BLOCK, block, start)
    out_ref[0, 0] = mixed / total[:, None]
    logsum_ref[0, 0] = top + jnp.log(total)


def backward_kernel(
    q_ref, k_ref, v_ref, out_ref, logsum_ref, slope_ref, dq_ref, dk_ref, dv_ref, *, before
):
    """Compute the weights again, a block of queries at a time."""
    keys, values = k_ref[0, 0], v_ref[0, 0]

    def block(number, carry):
        dk, dv = carry
        rows = pl.ds(number * BLOCK, BLOCK)
        queries, slope = q_ref[0, 0, rows, :], slope_ref[0, 0, rows, :]
        found = scores(queries, keys, before + number * BLOCK, 0)
        weights = jnp.exp(found - logsum_ref[0, 0, rows][:, None])
        own = (slope * out_ref[0, 0, rows, :]).sum(1, keepdims=True)
        change = weights * (slope @ values.T - own) / jnp.sqrt(queries.shape[-1])
        dq_ref[0, 0, rows, :] = change @ keys
        return dk + change.T @ queries, dv + weights.T @ slope

    start = (jnp.zeros_like(keys), jnp.zeros_like(values))
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[2] // BLOCK, block, start)
    dk_ref[0, 0], dv_ref[0, 0] = dk, dv


def flash_forward(q, k, v):
    """Return attention and its log-sums; fewer queries than keys are those of the last ones."""
    batch, heads, length, width = q.shape
    whole = pl.BlockSpec((1, 1, *k.shape[2:]), lambda b, h, i: (b, h, 0, 0))
    part = pl.BlockSpec((1, 1, BLOCK, width), lambda b, h, i: (b, h, i, 0))
    sums = pl.BlockSpec((1, 1, BLOCK), lambda b, h, i: (b, h, i))
    return pl.pallas_call(
        functools.partial(forward_kernel, before=k.shape[2] - length),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], q.dtype)),
        grid=(batch, heads, length // BLOCK),
        in_specs=[part, whole, whole],
        out_specs=(part, sums),
        interpret=True,  # host devices have no Pallas compiler
        name="flash_forward",
    )(q, k, v)


def flash_backward(q, k, v, out, logsum, slope):
    batch, heads, length, width = q.shape
    rows = pl.BlockSpec((1, 1, length, width), lambda b, h: (b, h, 0, 0))
    keys = pl.BlockSpec((1, 1, *k.shape[2:]), lambda b, h: (b, h, 0, 0))
    sums = pl.BlockSpec((1, 1, length), lambda b, h: (b, h, 0))
    return pl.pallas_call(
        functools.partial(backward_kernel, before=k.shape[2] - length),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        grid=(batch, heads),
        in_specs=[rows, keys, keys, rows, sums, rows],
        out_specs=(rows, keys, keys),
        interpret=True,
        name="flash_backward",
    )(q, k, v, out, logsum, slope)


@jax.custom_vjp
def attention(q, k, v):
    """Return causal attention of [batch, heads, length, width]."""
    return flash_forward(q, k, v)[0]


def attention_forward(q, k, v):
    out, logsum = flash_forward(q, k, v)
    return out, (q, k, v, out, logsum)


def attention_backward(saved, slope):
    q, k, v, out, logsum = saved
    return tuple(flash_backward(q, k, v, out, logsum, slope))


attention.defvjp(attention_forward, attention_backward)


def rule(text):
    """Return a rule: batch and heads may be cut, queries, keys and widths are read whole."""

    def of(eqn):
        batch, heads, length, width = eqn.invars[0].aval.shape
        keys = eqn.invars[1].aval.shape[2]
        sizes = {"b": batch, "h": heads, "q": length, "k": keys, "d": width}
        return ShardingRule.parse(text, sizes, replicated=("q", "k", "d"))

    return of


def products(count):
    """Return the operations of so many products of [queries, keys, width] per head."""
    return lambda eqn: 2.0 * count * eqn.invars[0].aval.size * eqn.invars[1].aval.shape[2]


# kernels are told apart by the name they are called with
alpa.sharding_rule(
    "pallas_call:flash_forward",
    rule("b h q d, b h k d, b h k d -> b h q d, b h q"),
    lambda call: list(flash_forward(*call.operands)),
    flops=products(2),
    causal=("q", "k"),  # queries look at no later keys: it runs in slices of the tokens
)
alpa.sharding_rule(
    "pallas_call:flash_backward",
    rule("b h q d, b h k d, b h k d, b h q d, b h q, b h q d -> b h q d, b h k d, b h k d"),
    lambda call: list(flash_backward(*call.operands)),
    linear_in=(5,),  # in the gradient of the output: parts of a sum of gradients may pass
    flops=products(5),
    causal=("q", "k"),
)


def loss_of(layers, batch, attend=attention):
    hidden = batch["x"]
    for layer in layers:
        q, k, v = (jnp.einsum("bse,ehd->bhsd", hidden, layer[name]) for name in "qkv")
        hidden = hidden + jnp.einsum("bhsd,hde->bse", attend(q, k, v), layer["out"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def train_step(layers, batch):
    loss, gradients = jax.value_and_grad(loss_of)(layers, batch)
    return jax.tree.map(lambda w, g: w - 0.5 * g, layers, gradients), loss


def make_layers(count=2, embed=8, heads=2, width=4):
    def layer(key):
        keys = dict(zip("qkv", jax.random.split(key, 3), strict=True))
        made = {name: jax.random.normal(k, (embed, heads, width)) / 3 for name, k in keys.items()}
        return made | {"out": jnp.full((heads, width, embed), 0.1)}

    return [layer(key) for key in jax.random.split(jax.random.key(0), count)]


def make_batch(examples=16, length=8, embed=8):
    x, noise = jax.random.normal(jax.random.key(1), (2, examples, length, embed))
    return {"x": x, "y": jnp.cumsum(x, 1) / jnp.arange(1, length + 1)[:, None] + 0.1 * noise}


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    options = alpa.Options(num_stages=2, num_microbatches=4, mesh_shape=(4,), preset="dp")
    step = alpa.parallelize(train_step, cluster="host:8", options=options)
    layers, batch = make_layers(), make_batch()
    for number in range(20):
        layers, loss = step(layers, batch)
        if number % 10 in (0, 9):
            print(f"step {number}: loss {float(loss):.4f}")
    whole = {name for one in step.plan.shardings for name in one.replicated_ops}
    print("operators on whole arrays:", ", ".join(whole) or "none")
    print(str(step.audit(layers, batch)).splitlines()[-1])


if __name__ == "__main__":
    main()
