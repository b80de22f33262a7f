"""Training steps in the idiom of jraph's examples."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from library_programs.batches import EXAMPLES


def _graph(draw, nodes=5, edges=8):
    return jraph.GraphsTuple(
        nodes=draw.normal(size=(nodes, 4)).astype("float32"),
        edges=draw.normal(size=(edges, 3)).astype("float32"),
        senders=draw.integers(0, nodes, edges),
        receivers=draw.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=np.zeros((1, 4), "float32"),
    )


class GraphNet(nn.Module):
    """One round of messages, one logit per graph."""

    @nn.compact
    def __call__(self, graph):
        @jraph.concatenated_args
        def update(features):
            return nn.relu(nn.Dense(8)(features))

        net = jraph.GraphNetwork(update, update, update)
        return nn.Dense(1)(net(graph).globals)[:, 0]


def padded_graphs():
    """One padded graph of many: nodes, edges and graphs differ in their number."""
    draw = np.random.default_rng(0)
    graphs = jraph.batch_np([_graph(draw, 3 + k % 3, 4 + k % 2) for k in range(EXAMPLES - 1)])
    graph = jraph.pad_with_graphs(graphs, 40, 64, EXAMPLES)
    batch = (jax.tree.map(jnp.asarray, graph), jnp.asarray(draw.integers(0, 2, EXAMPLES)))
    model = GraphNet()
    params = model.init(jax.random.key(0), batch[0])
    transform = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        params, opt_state = state
        graph, labels = batch

        def loss_fn(params):
            logits = model.apply(params, graph)
            mask = jraph.get_graph_padding_mask(graph)
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            return jnp.sum(losses * mask) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def graphs_of_one_size():
    """A graph per example, vmapped: gathers and segment sums in every example."""
    draw = np.random.default_rng(0)
    graphs = [_graph(draw) for _ in range(EXAMPLES)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *graphs)
    batch = (stacked, jnp.asarray(draw.integers(0, 2, EXAMPLES)))
    model = GraphNet()
    params = model.init(jax.random.key(0), graphs[0])
    transform = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        params, opt_state = state
        graph, labels = batch

        def loss_fn(params):
            found: Any = jax.vmap(lambda g: model.apply(params, g))(graph)
            logits = found[:, 0]
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transform.update(grads, opt_state)
        accuracy = jnp.mean((logits > 0) == labels)
        return (optax.apply_updates(params, updates), opt_state), (loss, accuracy)

    return step, (params, transform.init(params)), batch
