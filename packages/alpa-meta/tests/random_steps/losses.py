"""Random training steps of small networks: any terms, gradient, optimiser and reports together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from random_steps.rounds import ROUNDS
from random_steps.seen import EXAMPLES, look, make_batches, make_state
from random_steps.terms import MIXING, TERMS
from random_steps.updates import GRADIENTS, OPTIMISERS, REPORTS

PARTS = {
    **{f"loss:{name}": name for name in (*TERMS, *MIXING)},
    **{f"gradient:{name}": name for name in GRADIENTS},
    **{f"optimiser:{name}": name for name in OPTIMISERS},
    **{f"report:{name}": name for name in REPORTS},
    **{f"rounds:{name}": name for name in ROUNDS},
}


def choose(seed: int) -> tuple[str, ...]:
    """Return the parts of a random step: one to five terms, a gradient, an optimiser, reports; of
    some steps a loop of gradient accumulation."""
    rng = np.random.default_rng(seed)
    terms = list(rng.choice(list(TERMS), int(rng.integers(1, 6)), replace=False))
    if rng.random() < 0.1:
        terms.append(rng.choice(list(MIXING)))
    apart = np.random.default_rng(seed + 20_000)
    rounds = [f"rounds:{apart.choice(list(ROUNDS)[1:])}"] if apart.random() < 0.25 else []
    if rounds:
        terms = [name for name in terms if _takes_parts(name, seed)]
    gradient = rng.choice(list(GRADIENTS), p=[0.6, 0.2, 0.05, 0.15])
    return (
        *(f"loss:{name}" for name in terms),
        f"gradient:{gradient}",
        f"optimiser:{rng.choice(list(OPTIMISERS))}",
        f"report:{rng.choice(list(REPORTS))}",
        *rounds,
    )


def _takes_parts(name: str, seed: int) -> bool:
    """Return whether a term takes parts of the batch that are as small as rounds have them."""

    def value(state: Any, batch: Any) -> Any:
        part = jax.tree.map(lambda x: x[: EXAMPLES // 4], batch)
        return (TERMS | MIXING)[name](look(state["params"], part, state, state["key"]))

    try:
        jax.eval_shape(value, make_state(seed), make_batches(seed, 1)[0])
    except (TypeError, ValueError):
        return False
    return True


def _of(kind: str, parts: tuple[str, ...], otherwise: str) -> str:
    found = [part.partition(":")[2] for part in parts if part.startswith(f"{kind}:")]
    return found[0] if found else otherwise


def num_examples(seed: int) -> int:
    return EXAMPLES


def training(seed: int, parts: tuple[str, ...]) -> tuple[Any, Any, list[Any]]:
    """Return (step, state, batches) made of the parts; a part left out is the plainest."""
    every = TERMS | MIXING
    terms = [every[part.partition(":")[2]] for part in parts if part.startswith("loss:")]
    gradient_of = GRADIENTS[_of("gradient", parts, "plain")]
    optimiser = OPTIMISERS[_of("optimiser", parts, "sgd")]
    report = REPORTS[_of("report", parts, "nothing")]
    rounds = ROUNDS[_of("rounds", parts, "one")]
    weights = 0.5 + np.random.default_rng(seed).random(len(terms))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(state["key"])

        def gradient_on(part: Any, now: Any) -> tuple[Any, Any, Any]:
            def loss(params: Any) -> tuple[Any, Any]:
                seen = look(params, part, state, now)
                value = sum(weight * term(seen) for weight, term in zip(weights, terms))
                return value, (seen.results, seen.new)

            return gradient_of(loss, state)

        value, (results, new), gradient = rounds(gradient_on, batch, now)
        updates, moments = optimiser.update(gradient, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        state = state | {"count": state["count"] + 1, "key": key, "average": average} | new
        results = results | {"loss": value} | report(value, gradient, updates, state)
        return state | {"params": params, "moments": moments}, results

    state = make_state(seed)
    state["moments"] = optimiser.init(state["params"])
    return step, state, make_batches(seed, 2)
