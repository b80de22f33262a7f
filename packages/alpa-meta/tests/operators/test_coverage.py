"""Every primitive that the corpus of models uses has a rule, or stands here with the reason."""

from collections import Counter
from importlib.util import find_spec

import jax
import jax.extend.core.primitives as primitives
import pytest

from alpa_meta import compat
from alpa_meta.corpus import NAMES, build
from alpa_meta.operators import known_primitives, sharding_rule
from alpa_meta.step.trace import trace

REGIONS = {"scan", "while", "cond", "remat2", "checkpoint", "remat"}
WITHOUT_RULE: dict[str, str] = {}
NOT_OPERATORS = {
    # calls, which are inlined, and regions, whose bodies are planned
    "call",
    "closed_call",
    "custom_jvp_call",
    "custom_lin",
    "custom_linear_solve",
    "custom_vjp_call",
    "eval_jaxpr",
    "jit",
    "scan",
    "while",
    "cond",
    "remat2",
    "checkpoint",
    # collectives and per-device values, which exist inside shard_map only
    "all_gather",
    "all_to_all",
    "axis_index",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "psum2",
    "ragged_all_to_all",
    "psum_invariant",
    # references and effects, which tie an operator to one place
    "get",
    "swap",
    "create_token",
    "after_all",
    # an operator of the transposed max-pool only, always rewritten to select_and_scatter_add
    "select_and_scatter",
}


def without_rule(closed, found):
    for eqn in compat.open_jaxpr(closed).eqns:
        if eqn.primitive.name in REGIONS:
            for _, body in compat.subjaxprs(eqn):
                without_rule(body, found)
        elif sharding_rule(eqn) is None:
            found[eqn.primitive.name] += 1
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_of_the_corpus_has_a_rule(name):
    if name == "equinox-mlp" and find_spec("equinox") is None:
        pytest.skip("needs the extra alpa-meta[corpus]")
    model = build(name)
    closed, _ = trace(model.train_step, model.state, model.batch)
    assert set(without_rule(closed, Counter())) <= set(WITHOUT_RULE)


def test_every_public_primitive_of_jax_is_in_the_table():
    public = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    missing = public - NOT_OPERATORS - known_primitives()
    assert not missing, f"no entry for {sorted(missing)} of jax {jax.__version__}"
