"""What a layer costs at two sizes of a microbatch, as lines, and what of it the links take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_interchange.menu import Affine, AxisPart
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.stage_costs import StageCosts
from alpa_meta.types import Floats


@frozen(eq=False)
class Sized:
    """The program with microbatches of `samples` examples, and one kind of recomputation."""

    samples: int
    recomputation: str
    outlook: Outlook

    @property
    def count(self) -> int:
        return self.outlook.program.num_microbatches


@frozen(eq=False)
class RowLine:
    """What one layer costs at two sizes, which may be one."""

    layer: int
    sizes: tuple[Sized, Sized]
    costs: tuple[StageCosts, StageCosts]

    def affine(self, what: str) -> Affine:
        """Return a quantity of one microbatch, as a line without negative parts."""
        per_step = what in ("forward", "backward", "by_weight", "split")
        here, there = (
            float(getattr(costs, what)[self.layer]) / (sized.count if per_step else 1)
            for sized, costs in zip(self.sizes, self.costs, strict=True)
        )
        return _through(self.sizes, here, there)


@frozen(eq=False)
class LinkLine:
    """What links take of one layer's seconds at two sizes, which may be one."""

    layer: int
    sizes: tuple[Sized, Sized]
    links: tuple[Mapping[str, Floats], Mapping[str, Floats]]

    def sent(self, what: str) -> tuple[AxisPart, ...]:
        """Return the parts that links take of one microbatch's seconds."""
        here, there = (
            links[what][self.layer] / sized.count
            for sized, links in zip(self.sizes, self.links, strict=True)
        )
        pairs = zip(here.tolist(), there.tolist(), strict=True)
        return axis_parts(
            [(_through(self.sizes, a, c), _through(self.sizes, b, d)) for (a, b), (c, d) in pairs]
        )


def _through(sizes: tuple[Sized, Sized], here: float, there: float) -> Affine:
    size, other = (sized.samples for sized in sizes)
    if size == other:
        return Affine(0.0, here / size)
    each = max((there - here) / (other - size), 0.0)
    fixed = here - each * size
    return Affine(fixed, each) if fixed >= 0 else Affine(0.0, here / size)


def minus(whole: Affine, part: Affine) -> Affine:
    return Affine(max(whole.fixed - part.fixed, 0.0), max(whole.each - part.each, 0.0))


def axis_parts(by_axis: Sequence[tuple[Affine, Affine]]) -> tuple[AxisPart, ...]:
    """Return the (latency, bytes) parts of each axis, of those that have any."""
    return tuple(
        AxisPart(axis=axis, latency=latency, bytes=size)
        for axis, (latency, size) in enumerate(by_axis)
        if (latency, size) != (Affine(), Affine())
    )


def without(whole: Sequence[AxisPart], taken: Sequence[AxisPart]) -> tuple[AxisPart, ...]:
    """Return the parts of what is left of `whole`."""
    of = {part.axis: part for part in taken}
    nothing = AxisPart(axis=0)
    return tuple(
        AxisPart(
            axis=part.axis,
            latency=minus(part.latency, of.get(part.axis, nothing).latency),
            bytes=minus(part.bytes, of.get(part.axis, nothing).bytes),
        )
        for part in whole
    )


def line_ends(sizes: Sequence[Sized], split: int) -> tuple[Sized, Sized]:
    """Return the least and the greatest of the sizes that `split` parts divide."""
    found = sorted((one for one in sizes if one.samples % split == 0), key=lambda one: one.samples)
    return (found[0], found[-1]) if found else (sizes[0], sizes[0])
