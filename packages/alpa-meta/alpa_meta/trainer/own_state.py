"""The state of a user's program in a checkpoint: its arrays by path, keys as their words.

Leaves that are no arrays (functions, static numbers) are the program's own, which makes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta.execution.piecewise import gathered
from alpa_meta.step.arguments import is_array
from alpa_meta.step.pure_call import without_objects
from alpa_meta.trainer.checkpoint import Checkpoint, restore_state


def stored_state(state: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a state, whole on the host, by path."""
    return {path: np.asarray(_words(leaf)) for path, leaf in _arrays(gathered(_pytree(state)))}


def restored_state(checkpoint: Checkpoint, state: Any) -> Any:
    """Return a state like `state`, the program's first, with the arrays of a checkpoint.

    CheckpointError lists the arrays that differ in path, shape or dtype.
    """
    tree, rebuild = without_objects(state)
    shapes = {path: jax.eval_shape(_words, leaf) for path, leaf in _arrays(tree)}
    found = restore_state(checkpoint, shapes)

    def restored(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return _like(leaf, found[name]) if name in found else leaf

    return rebuild(jax.tree_util.tree_map_with_path(restored, tree))


def _pytree(state: Any) -> Any:
    return without_objects(state)[0]


def _arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of a pytree's leaves; numbers are arrays, as steps return them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_array(leaf):
            yield jax.tree_util.keystr(path), leaf


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _words(leaf: Any) -> Any:
    """Return an array of a dtype that files know."""
    words: Callable[[Any], Any] = jax.random.key_data
    return words(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _like(leaf: Any, array: np.ndarray) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array) if hasattr(leaf, "dtype") else type(leaf)(array.item())
