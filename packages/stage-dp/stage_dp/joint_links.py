"""Which link each boundary of a pipeline crosses, and what that costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from alpa_interchange.menu import LINKS, JointProblem, no_boundary_floor
from stage_dp.device_pool import place
from stage_dp.menu_table import Array, MenuTable


class Links:
    """Placements of pipelines and boundary seconds of one problem, remembered."""

    def __init__(self, problem: JointProblem) -> None:
        self.problem = problem
        self.submeshes = [mesh.submesh for mesh in problem.menu.meshes]
        self._placed: dict[tuple[int, ...], tuple[tuple[int, ...], ...] | None] = {}
        self._seconds: dict[tuple[int, int, int, int, str, int], float] = {}
        self._floors: dict[tuple[int, int, int, str, int], float] = {}
        self._crossings: dict[int, tuple[Array, Array, Array]] = {}
        self._host: list[tuple[int, int]] = []  # group and host of each device
        for g, group in enumerate(problem.device_groups):
            for h in range(group.num_hosts):
                self._host += [(g, h)] * group.devices_per_host
        kinds = list(dict.fromkeys(self.submeshes))
        self.num_kinds = len(kinds)
        self.kind = [kinds.index(s) for s in self.submeshes]
        # Whether layouts that no row has count as well. Also where only the boundaries have floors:
        # to price the transfers between all rows of GPT-39B on 64 V100 takes 60 CPU s.
        self.floored = problem.boundary_floor is not no_boundary_floor or any(
            mesh.floors for mesh in problem.menu.meshes
        )

    def placed(self, meshes: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        """Return the devices of each stage on `meshes`; None if they do not fit together."""
        key = tuple(self.kind[m] for m in meshes)
        if key not in self._placed:
            try:
                chosen = place(self.problem.device_groups, [self.submeshes[m] for m in meshes])
            except ValueError:
                self._placed[key] = None
            else:
                self._placed[key] = chosen
        return self._placed[key]

    def crossed(self, meshes: Sequence[int]) -> tuple[str, ...]:
        """Return the link of each boundary of stages on `meshes`, which fit together."""
        devices = self.placed(meshes) or ()
        return tuple(self._link(*pair) for pair in itertools.pairwise(devices))

    def most_alike(self, mesh: int) -> int:
        """Return how many meshes like `mesh` fit together, or a little more."""
        submesh = self.submeshes[mesh]
        group = self.problem.device_groups[submesh.host_group]
        parts = group.num_hosts * (group.devices_per_host // submesh.devices_per_host)
        return parts // submesh.num_hosts if submesh.num_hosts <= group.num_hosts else 0

    def ring(self, mesh: int, num: int) -> tuple[str, ...] | None:
        """Return the link from each of `num` meshes like `mesh` to the next, from the last to the
        first; None if they do not fit together."""
        devices = self.placed([mesh] * num)
        if devices is None:
            return None
        return tuple(self._link(devices[i], devices[(i + 1) % num]) for i in range(num))

    def _link(self, before: tuple[int, ...], after: tuple[int, ...]) -> str:
        hosts = {self._host[d] for d in (*before, *after)}
        groups = {g for g, _ in hosts}
        return "host" if len(hosts) == 1 else "hosts" if len(groups) == 1 else "groups"

    def seconds(self, a: int, layout_out: int, b: int, layout_in: int, link: str, n: int) -> float:
        """Return the seconds one way of a microbatch of `n` samples from mesh a to mesh b."""
        key = (a, layout_out, b, layout_in, link, n)
        if key not in self._seconds:
            cost = self.problem.boundary(a, layout_out, b, layout_in, link)
            self._seconds[key] = cost.value(n)
        return self._seconds[key]

    def possible(self, a: int, b: int) -> tuple[str, ...]:
        """Return the links that neighbours on meshes a and b may have, nearest first."""
        first, second = self.submeshes[a], self.submeshes[b]
        if first.host_group != second.host_group:
            return (LINKS[2],)
        room = self.problem.device_groups[first.host_group].devices_per_host
        near = first.num_hosts == second.num_hosts == 1
        if near and first.devices_per_host + second.devices_per_host <= room:
            return LINKS[:2]
        return (LINKS[1],)

    def least(self, a: int, layout_out: int, b: int, layout_in: int, n: int) -> float:
        """Return the least seconds over the links that a and b may have."""
        return min(self.all_seconds(a, layout_out, b, layout_in, n))

    def floor(
        self,
        table: MenuTable,
        classes: tuple[int, int],
        meshes: tuple[int, int],
        links: Sequence[str],
    ) -> float:
        """Return the least seconds one way between layers of two `classes` on two `meshes`, over
        the best of `links`: in any layout where there are floors, else in those of the rows."""
        (before, after), (a, b) = classes, meshes
        if self.floored:
            floor = self.problem.boundary_floor
            return min(floor(before, a, b, link).value(table.samples) for link in links)
        outs = np.unique(table.rows[a][before].layout_out).tolist()
        ins = np.unique(table.rows[b][after].layout_in).tolist()
        return min(
            (
                self.seconds(a, y, b, x, link, table.samples)
                for y, x, link in itertools.product(outs, ins, links)
            ),
            default=math.inf,
        )

    def floor_after(self, table: MenuTable, stop: int, meshes: tuple[int, int], link: str) -> float:
        """Return the least seconds one way over a link after a stage that stops at layer `stop`, in
        any layout; there are floors."""
        a, b = meshes
        number = self.problem.menu.class_of_layer[stop - 1]
        key = (number, a, b, link, table.samples)
        if key not in self._floors:
            cost = self.problem.boundary_floor(number, a, b, link)
            self._floors[key] = cost.value(table.samples)
        return self._floors[key]

    def crossings(self, table: MenuTable, meshes: Sequence[int]) -> tuple[Array, Array, Array]:
        """Return the least seconds one way after a stage of each kind of submesh that stops at a
        layer, the least from host to host, [layers + 1, kinds] both, and the most, [kinds], where
        stages are on `meshes`."""
        if table.samples in self._crossings:
            return self._crossings[table.samples]
        pairs = list(itertools.pairwise(self.problem.menu.class_of_layer))
        least, far = np.full((2, len(pairs) + 2, self.num_kinds), np.inf)
        most = np.zeros(self.num_kinds)
        # Floors are the same for all meshes of a kind.
        some = list({self.kind[m]: m for m in meshes}.values()) if self.floored else meshes
        for a, b in itertools.product(some, repeat=2):
            kind, links = self.kind[a], self.possible(a, b)
            for found, allowed in ((least, links), (far, [x for x in links if x != LINKS[0]])):
                own = {pair: self.floor(table, pair, (a, b), allowed) for pair in set(pairs)}
                found[1:-1, kind] = np.minimum(found[1:-1, kind], [own[pair] for pair in pairs])
            most[kind] = math.inf if self.floored else max(most[kind], self._longest(table, a, b))
        self._crossings[table.samples] = least, far, most
        return self._crossings[table.samples]

    def _longest(self, table: MenuTable, a: int, b: int) -> float:
        """Return the most seconds one way between rows of two meshes."""
        outs = {int(y) for rows in table.rows[a].values() for y in rows.layout_out}
        ins = {int(x) for rows in table.rows[b].values() for x in rows.layout_in}
        return max(
            (
                seconds
                for y, x in itertools.product(outs, ins)
                for seconds in self.all_seconds(a, y, b, x, table.samples)
            ),
            default=0.0,
        )

    def all_seconds(self, a: int, layout_out: int, b: int, layout_in: int, n: int) -> list[float]:
        """Return the seconds over each link that a and b may have."""
        return [self.seconds(a, layout_out, b, layout_in, x, n) for x in self.possible(a, b)]
