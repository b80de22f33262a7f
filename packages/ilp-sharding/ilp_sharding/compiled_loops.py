"""Whether compiled loops may be called in this process under a deadline, and compiling ahead.

The first call of a loop in a process reads machine code from numba's cache (all of them: two
seconds of CPU) or, on a machine that never ran it, compiles it (half a minute of CPU). Neither can
be interrupted. So under a deadline the caller's process calls loops only if they are loaded, or if
there is time to load them, and to compile those of which no mark beside the cache says that they
are -> ready(). All else is left to `numpy_sweeps` and to worker processes, which the deadline can
end.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ilp_sharding.problem.flat_graph import TableGraph

_LOADING_SECONDS = 4.0  # to load compiled loops from the cache, on a busy machine,
_COMPILING_SECONDS = {  # and to compile them: three times the CPU seconds measured
    "exact.elimination_loops": 9.0,
    "problem.graph_loops": 6.0,
    "bound.messages": 16.0,
    "bound.pruned_sweeps": 48.0,
    "bound.dominance": 21.0,
    "choice.forest_moves": 21.0,
    "choice.ball_minimisation": 45.0,
}
_LAST = {  # of every module with loops, one that is called last
    "exact.elimination_loops": "walk_back",
    "problem.graph_loops": "keep_active",
    "bound.messages": "decode",
    "bound.pruned_sweeps": "climb",
    "bound.dominance": "drop_unsupported",
    "choice.forest_moves": "descend",
    "choice.ball_minimisation": "search_neighbourhoods",
}
HALVES = (
    ("bound.messages", "bound.pruned_sweeps"),
    (
        "exact.elimination_loops",
        "problem.graph_loops",
        "bound.dominance",
        "choice.forest_moves",
        "choice.ball_minimisation",
    ),
)
"""All modules with loops, for two processes that compile them at once: 40 CPU seconds in all."""


def ready(seconds: float, *names: str) -> bool:
    """Return whether the loops of the modules `names` are loaded, or can be in time.

    `seconds` is the time left; if it is long, they may be compiled too.
    """
    missing = [name for name in names if not loaded(name)]
    if not missing or math.isinf(seconds):
        return True
    if seconds < _LOADING_SECONDS:
        return False
    return seconds >= _LOADING_SECONDS + sum(
        _COMPILING_SECONDS[name] for name in uncompiled(missing)
    )


def uncompiled(names: Iterable[str] = tuple(_LAST)) -> list[str]:
    """Return those of the modules `names` whose loops are not known to be in the cache."""
    marks = {name: _mark(name) for name in names}
    return [name for name, mark in marks.items() if mark is None or not mark.exists()]


def load(*names: str) -> None:
    """Load the loops of the modules `names`, compile them if need be, and leave their marks."""
    for name in names:
        if loaded(name):
            continue
        _run(name)
        mark = _mark(name)
        if mark is not None and not mark.exists():
            try:
                mark.touch()
            except OSError:
                continue  # nobody else can use this cache either


def warm_up(progress: Callable[[str, float], None] = lambda name, share: None) -> None:
    """Compile all loops, or load them from the cache, so that no later `solve` waits for that.

    Half a minute of CPU on a machine that never did it, then two seconds in every process.
    `progress` hears the name of the next group of loops and the share done before it.
    """
    shares = {
        "exact.elimination_loops": 0.0,
        "problem.graph_loops": 0.1,
        "bound.messages": 0.13,
        "bound.pruned_sweeps": 0.25,
        "bound.dominance": 0.55,
        "choice.forest_moves": 0.55,
        "choice.ball_minimisation": 0.67,
    }
    for name in _LAST:
        progress(name, shares[name])
        load(name)
    progress("done", 1.0)


def loaded(name: str) -> bool:
    """Return whether the loops of this module may be called at once."""
    module = sys.modules.get(f"ilp_sharding.{name}")
    return module is not None and bool(getattr(module, _LAST[name]).signatures)


def _run(name: str) -> None:
    """Call the loops of the module `name` on a small problem."""
    if name == "exact.elimination_loops":
        from ilp_sharding.exact.elimination_loops import run_sample

        run_sample()
        return
    from ilp_sharding.bound.dominance import simplified, without_dominated
    from ilp_sharding.bound.dual_ascent import DualAscent
    from ilp_sharding.branching.hubs import HubTree

    graph = _sample()
    if name == "problem.graph_loops":
        graph.consistent()
        graph.restricted(np.arange(graph.num_strategies) % 2 == 0)
    elif name == "bound.dominance":
        without_dominated(simplified(graph))
    elif name == "bound.pruned_sweeps":
        from ilp_sharding.methods import pruned

        pruned.run_sample(graph)
    elif name == "bound.messages":
        dual = DualAscent(graph)
        dual.step(math.inf)
        dual.reduced(1)
        HubTree(dual).dive(math.inf, lambda: False)
        dual.decoded()
    else:
        from ilp_sharding.choice.construction import PrimalSearch

        start, free = np.zeros(graph.num_nodes, np.int64), np.zeros(graph.num_strategies)
        primal = PrimalSearch(graph, 0)
        primal.construct(start, free, polish=2 if name == "choice.ball_minimisation" else 0)


def _sample() -> TableGraph:
    """Return a small graph with memory rows."""
    from alpa_interchange.selection import ShardingProblem
    from ilp_sharding.options import SolveOptions
    from ilp_sharding.problem.flat_graph import table_graph
    from ilp_sharding.problem.instance import Instance
    from ilp_sharding.problem.memory_rows import MemoryProfile
    from ilp_sharding.problem.reduction import Network

    num_nodes, size = 32, 4
    random = np.random.default_rng(0)
    first = np.arange(num_nodes)
    pairs = np.concatenate([np.stack([first, (first + step) % num_nodes], 1) for step in (1, 5)])
    problem = ShardingProblem(
        num_strategies=np.full(num_nodes, size),
        node_cost=random.random(num_nodes * size),
        node_memory=random.random(num_nodes * size),
        live=np.stack([first, first + 3], 1),
        edges=pairs,
        edge_cost=random.random(len(pairs) * size * size),
        memory_limit=2.5,
    )
    instance = Instance.of(problem, SolveOptions())
    network = Network(instance)
    network.reduce()
    memory = MemoryProfile(instance, network)
    return table_graph(network, memory)


def _processor() -> str:
    """Return what kind of processor this is; compiled code is made for one kind."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        lines = facts.read_text(errors="replace").splitlines()
        told = sorted({line for line in lines if line.startswith(("model name", "flags", "CPU"))})
        if told:
            return repr(told)
    return f"{platform.machine()} {platform.processor()}"


def _mark(name: str) -> Path | None:
    """Return where the mark of this module, this numba and this processor is kept."""
    import numba

    module = importlib.import_module(f"ilp_sharding.{name}")
    folder = getattr(module, _LAST[name]).stats.cache_path
    if not folder:
        return None
    status = Path(str(module.__file__)).stat()
    parts = (
        *(numba.__version__, np.__version__, sys.version, _processor()),
        *(status.st_mtime_ns, status.st_size),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(folder) / f"{name}.{digest}.compiled"
