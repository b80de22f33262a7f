"""The menu kept beside a plan, to explain and change it without a trace (-> menu_problem.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from alpa_interchange import (
    ClusterSpec,
    KeptMenu,
    ShardingSpec,
)
from alpa_interchange.kept_menu import MenuLeaf, RowSpecs
from alpa_meta.compat import JaxprEqn, Literal
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.scope_facts import state_by_layer, state_layers
from alpa_meta.inter_op.staging import Staging
from alpa_meta.options import Options
from alpa_meta.planning.menu_search import MenuSearch
from alpa_meta.planning.outlooks import layers_of
from alpa_meta.planning.plan_identity import fingerprint
from alpa_meta.step.program import Program, Step

_LOG = logging.getLogger("alpa_meta")

MAX_ROWS = 20_000  # of a menu that is kept: some 30 MB; GPT-39B on 64 devices has 4,000


def keep(
    search: MenuSearch, outlook: Outlook, step: Step, cluster: ClusterSpec, options: Options
) -> KeptMenu | None:
    """Return the menu of a search as a document; None, with a log message, where it is too large.

    `outlook`: the program that the menu's rows were made from, at any size.
    """
    menu, problem = search.menu, search.problem
    num_rows = sum(len(rows) for mesh in menu.meshes for rows in mesh.rows)
    if num_rows > MAX_ROWS:
        _LOG.warning("the menu of %d rows is not kept: at most %d are", num_rows, MAX_ROWS)
        return None
    program = outlook.program
    order: Staging | Layering = outlook.staging
    if program.left_out is not None:  # the layers of which are those of the whole batch
        program = step.program(1)
        order = layers_of(program, options, cluster)
    leaves = _leaves(program, order.eqns, order.layers, menu.class_of_layer)
    numbers: dict[ShardingSpec, int] = {}
    places = {(mesh.submesh, mesh.logical): number for number, mesh in enumerate(menu.meshes)}
    state = tuple(
        RowSpecs(
            mesh=places[submesh, logical],
            key=key,
            specs=tuple(
                tuple(numbers.setdefault(spec, len(numbers)) for spec in of_class)
                for of_class in specs
            ),
        )
        for (submesh, logical, key), specs in search.builder.state.items()
        if leaves and (submesh, logical) in places
    )
    return KeptMenu(
        fingerprint=fingerprint(step),
        cluster=cluster,
        batch_size=problem.batch_size,
        counts=problem.counts or (),
        schedules=problem.schedules,
        num_stages=problem.num_stages,
        memory=options.memory,
        menu=menu,
        crossing=tuple(map(tuple, search.crossing)),
        leaves=leaves,
        specs=tuple(numbers),
        state=state,
    )


def _leaves(
    program: Program,
    eqns: Sequence[JaxprEqn],
    layers: Sequence[int | None],
    class_of_layer: Sequence[int],
) -> tuple[MenuLeaf, ...]:
    """Return the state of a program by layer; none where layers of a class hold different state.

    Such layers (a tied weight updated with one of them) have no common specs to be kept.
    """
    carried = [
        (atom, program.jaxpr.invars[alias])
        for atom, alias in zip(program.jaxpr.outvars, program.aliases, strict=True)
        if alias is not None and not isinstance(atom, Literal)
    ]
    home = state_layers(eqns, layers, carried)
    parts = program.input_parts or (None,) * len(program.inputs)
    of_var = dict(zip(program.jaxpr.invars, zip(program.inputs, parts, strict=True), strict=True))
    found: list[MenuLeaf] = []
    shapes: dict[int, list[tuple[tuple[int, ...], str]]] = {}
    for layer, variables in sorted(state_by_layer(program, home).items()):
        own = []
        for var in variables:
            leaf, part = of_var[var]
            own.append((tuple(leaf.aval.shape), str(leaf.aval.dtype)))
            start, stop = (None, None) if part is None else (part.start, part.stop)
            found.append(
                MenuLeaf(
                    path=leaf.leaf_path,
                    shape=own[-1][0],
                    dtype=own[-1][1],
                    layer=layer,
                    start=start,
                    stop=stop,
                )
            )
        if shapes.setdefault(class_of_layer[layer], own) != own:
            return ()
    return tuple(found)
