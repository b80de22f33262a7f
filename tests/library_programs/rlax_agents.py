"""Training steps in the idiom of rlax's examples: returns over time, targets, policies."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

from library_programs.batches import EXAMPLES, WIDTH

TIME, ACTIONS = 5, 3


def _params(outputs):
    keys = jax.random.split(jax.random.key(0), 1 + len(outputs))
    heads = {
        name: jax.random.normal(key, (8, size)) / 3
        for (name, size), key in zip(outputs.items(), keys[1:], strict=True)
    }
    return {"torso": jax.random.normal(keys[0], (WIDTH, 8)) / 3, **heads}


def _outputs(params, observation):
    hidden = jnp.tanh(observation @ params["torso"])
    return {name: hidden @ w for name, w in params.items() if name != "torso"}


def _trajectories(time=TIME):
    draw = np.random.default_rng(0)
    return {
        "observation": jnp.asarray(draw.normal(size=(EXAMPLES, time + 1, WIDTH)).astype("f")),
        "action": jnp.asarray(draw.integers(0, ACTIONS, (EXAMPLES, time))),
        "reward": jnp.asarray(draw.normal(size=(EXAMPLES, time)).astype("float32")),
        "discount": jnp.asarray(0.9 * (draw.uniform(size=(EXAMPLES, time)) > 0.1)).astype("f"),
        "log_prob": jnp.asarray(-1.0 - 0.2 * draw.uniform(size=(EXAMPLES, time))).astype("f"),
    }


@chex.dataclass
class Learner:
    """What a value learner keeps."""

    online: dict[str, Any]
    target: dict[str, Any]
    opt_state: optax.OptState
    count: jax.Array


learner: Any = Learner  # made by chex, which no type checker sees through


def deep_q_network():
    """Double Q-learning with a target network that is replaced every other step."""
    draw = np.random.default_rng(0)
    batch = {
        "obs_tm1": jnp.asarray(draw.normal(size=(EXAMPLES, WIDTH)).astype("float32")),
        "a_tm1": jnp.asarray(draw.integers(0, ACTIONS, EXAMPLES)),
        "r_t": jnp.asarray(draw.normal(size=EXAMPLES).astype("float32")),
        "discount_t": jnp.full(EXAMPLES, 0.9),
        "obs_t": jnp.asarray(draw.normal(size=(EXAMPLES, WIDTH)).astype("float32")),
    }
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(online, target, batch):
        q_tm1 = _outputs(online, batch["obs_tm1"])["q"]
        selector = _outputs(online, batch["obs_t"])["q"]
        q_t = _outputs(target, batch["obs_t"])["q"]
        errors = jax.vmap(rlax.double_q_learning)(
            q_tm1, batch["a_tm1"], batch["r_t"], batch["discount_t"], q_t, selector
        )
        return jnp.mean(rlax.l2_loss(errors)), errors

    def step(state, batch):
        (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.online, state.target, batch
        )
        updates, opt_state = transform.update(grads, state.opt_state)
        online = optax.apply_updates(state.online, updates)
        target = optax.periodic_update(online, state.target, state.count + 1, 2)
        new = learner(online=online, target=target, opt_state=opt_state, count=state.count + 1)
        return new, {"loss": loss, "priorities": jnp.abs(errors)}

    params = _params({"q": ACTIONS})
    state = learner(
        online=params,
        target=jax.tree.map(jnp.copy, params),
        opt_state=transform.init(params),
        count=jnp.int32(0),
    )
    return step, state, batch


def proximal_policy():
    """PPO: generalised advantages by a scan over time, normalised over the whole batch."""
    batch = _trajectories()
    params = _params({"logits": ACTIONS, "value": 1})
    transform = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    values = _outputs(params, batch["observation"])["value"][..., 0]
    batch["value"] = values

    def step(state, batch):
        params, opt_state = state
        advantages = jax.vmap(rlax.truncated_generalized_advantage_estimation, (0, 0, None, 0))(
            batch["reward"], batch["discount"], 0.95, batch["value"]
        )
        targets = advantages + batch["value"][:, :-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        def loss_fn(params):
            out = _outputs(params, batch["observation"][:, :-1])
            log_probs = jax.nn.log_softmax(out["logits"])
            chosen = jnp.take_along_axis(log_probs, batch["action"][..., None], -1)[..., 0]
            ratio = jnp.exp(chosen - batch["log_prob"])
            clipped = jnp.clip(ratio, 0.8, 1.2)
            policy = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
            value = 0.5 * jnp.square(out["value"][..., 0] - targets).mean()
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
            return policy + 0.5 * value - 0.01 * entropy, (policy, value, entropy)

        (_, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), parts

    return step, (params, transform.init(params)), batch


def importance_weighted_actor_learner():
    """IMPALA: V-trace targets of time-major trajectories, vmapped over the batch."""
    batch = _trajectories()
    params = _params({"logits": ACTIONS, "value": 1})
    transform = optax.rmsprop(1e-2, decay=0.99, eps=1e-1)

    def example_loss(params, t):
        out = _outputs(params, t["observation"])
        value, logits = out["value"][:, 0], out["logits"][:-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), t["action"][:, None], -1)[:, 0]
        rho = jnp.exp(chosen - t["log_prob"])
        returns = rlax.vtrace_td_error_and_advantage(
            value[:-1], value[1:], t["reward"], t["discount"], jax.lax.stop_gradient(rho), 0.95
        )
        weights = jnp.ones(TIME)
        policy = rlax.policy_gradient_loss(logits, t["action"], returns.pg_advantage, weights)
        entropy = rlax.entropy_loss(logits, weights)
        return policy + 0.5 * jnp.mean(returns.errors**2) + 0.01 * entropy

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            return jnp.mean(jax.vmap(example_loss, in_axes=(None, 0))(params, batch))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def reinforce_with_baseline():
    """Discounted returns, a baseline of the batch's mean return, masked steps."""
    batch = _trajectories()
    batch["mask"] = jnp.cumprod(batch["discount"] > 0, axis=1).astype(jnp.float32)
    params = _params({"logits": ACTIONS})
    transform = optax.sgd(0.1)

    def step(state, batch):
        params, opt_state = state
        returns = jax.vmap(rlax.discounted_returns, (0, 0, None))(
            batch["reward"], batch["discount"], 0.0
        )
        baseline = jnp.sum(returns * batch["mask"]) / jnp.sum(batch["mask"])

        def loss_fn(params):
            logits = _outputs(params, batch["observation"][:, :-1])["logits"]
            losses = jax.vmap(rlax.policy_gradient_loss)(
                logits, batch["action"], returns - baseline, batch["mask"]
            )
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), (loss, baseline)

    return step, (params, transform.init(params)), batch
