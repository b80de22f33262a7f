"""Which link each boundary of a pipeline crosses, and what that costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from alpa_interchange.menu import LINKS, JointProblem
from stage_dp.device_pool import place


class Links:
    """Placements of pipelines and boundary seconds of one problem, remembered."""

    def __init__(self, problem: JointProblem) -> None:
        self.problem = problem
        self.submeshes = [mesh.submesh for mesh in problem.menu.meshes]
        self._placed: dict[tuple[int, ...], tuple[tuple[int, ...], ...] | None] = {}
        self._seconds: dict[tuple[int, int, int, int, str, int], float] = {}
        self._host: list[tuple[int, int]] = []  # group and host of each device
        for g, group in enumerate(problem.device_groups):
            for h in range(group.num_hosts):
                self._host += [(g, h)] * group.devices_per_host
        kinds = list(dict.fromkeys(self.submeshes))
        self.kind = [kinds.index(s) for s in self.submeshes]

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

    def all_seconds(self, a: int, layout_out: int, b: int, layout_in: int, n: int) -> list[float]:
        """Return the seconds over each link that a and b may have."""
        return [self.seconds(a, layout_out, b, layout_in, x, n) for x in self.possible(a, b)]
