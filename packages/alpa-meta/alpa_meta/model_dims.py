"""Which dims of a model's parameters are one dim of the model, and which of those to cut.

Two dims are of one *class* where an operator of the forward pass carries the one over into the
other (its sharding rule has one factor, or one leading factor, for both): the width of the residual
stream, the heads of a layer, the inner width of a feed-forward, the vocabulary. Names of parameters
play no part.

Tensor parallelism (Megatron) cuts classes such that of every parameter one dim is cut at most, so
that a product whose columns are cut is followed by one whose rows are. With W(c) the share of
parameter elements that a cut of class c divides and S(c) the bytes that it leaves as unreduced sums
or moves (results of what contracts c, activations in front of products that make c), as a share of
the results of all products of parameters:

    maximise    sum over c of x(c) (W(c) - S(c) / 2)                          -> _gains()
    subject to  x(c) + x(d) <= 1 for two classes c, d of dims of one parameter -> tensor_cut()

Cutting the residual stream covers as many parameters as cutting heads, inner widths and vocabulary,
but most products would end in sums of their whole result; the half lets coverage win otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from attrs import field, frozen

import ilp_sharding
from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.operators import flops, sharding_rule
from alpa_meta.program_caches import cached_by_program
from alpa_meta.region_bindings import bindings, trips
from alpa_meta.step.program import Program
from ilp_sharding.strategies import ProblemBuilder

_SUM_WEIGHT = 0.5  # of S(c) against W(c): sums break ties between cuts that cover alike

DimKey = tuple[Var, int]
Class = DimKey
"""A class is named by one of its dims."""


@frozen(eq=False)
class _Union:
    """Disjoint sets of dims."""

    parent: dict[DimKey, DimKey] = field(factory=dict)

    def find(self, dim: DimKey) -> Class:
        root = dim
        while (above := self.parent.get(root, root)) != root:
            root = above
        while dim != root:
            above = self.parent.get(dim, dim)
            self.parent[dim] = root
            dim = above
        return root

    def join(self, first: DimKey, second: DimKey) -> None:
        self.parent[self.find(first)] = self.find(second)


@frozen(eq=False)
class Product:
    """A product of several operands: its work in a step and the classes of its factors, also
    `tight` ones."""

    flops: float
    classes: frozenset[Class]
    tight: frozenset[Class]


@frozen(eq=False)
class ModelDims:
    """The classes of a program's dims; parameters are state that the forward pass reads.

    `sums` are the bytes that a cut of a class leaves to be summed or moved in a step, `experts` the
    dims of parameters that products keep apart (a batch of matrices), `split` the sizes into which
    a dim falls as far as it is a dim of its own (heads x head size: heads).
    """

    parameters: tuple[Var, ...]
    optimiser: tuple[Var, ...]
    batch: frozenset[Class]
    products: tuple[Product, ...]
    sums: Mapping[Class, float]
    used: frozenset[Class]
    experts: frozenset[DimKey]
    mirrors: Mapping[DimKey, tuple[DimKey, ...]]
    classes: _Union
    tight: _Union
    produced_bytes: float
    split: Mapping[DimKey, int]

    def tensor_cut(self, size: int) -> Mapping[Var, int]:
        """Return {state input: dim} that tensor parallelism over `size` devices cuts."""
        cut = _chosen(self, size)
        return self.with_mirrors(
            {
                var: dim
                for var in self.parameters
                for dim in self._cuttable(var, size)
                if self.classes.find((var, dim)) in cut
            }
        )

    def expert_cut(self, size: int) -> Mapping[Var, int]:
        """Return {state input: dim} that expert parallelism over `size` devices cuts."""
        return self.with_mirrors(
            {var: dim for var, dim in self.experts if shape_of(var)[dim] % size == 0}
        )

    def with_mirrors(self, cut: Mapping[Var, int]) -> dict[Var, int]:
        """Return the cut of parameters with that of optimiser state that mirrors their dims."""
        found = dict(cut)
        for (var, dim), mirrored in self.mirrors.items():
            if mirrored and all(cut.get(parameter) == at for parameter, at in mirrored):
                found[var] = dim
        return found

    def flops_share(self, cut: Collection[DimKey]) -> float:
        """Return the share of the products' flops in which a factor of a cut dim occurs."""
        tight = {self.tight.find(dim) for dim in cut if dim[0] in self.parameters}
        batch = {self.classes.find(dim) for dim in cut} & self.batch
        total = sum(product.flops for product in self.products)
        covered = sum(p.flops for p in self.products if p.classes & batch or p.tight & tight)
        return covered / total if total else 1.0

    def _cuttable(self, var: Var, size: int) -> Iterator[int]:
        for dim, length in enumerate(shape_of(var)):
            if length % size == 0 and self.split.get((var, dim), length) % size == 0:
                yield dim


@cached_by_program(4)
def model_dims(program: Program) -> ModelDims:
    """Return the classes of the dims of a program's parameters, batch and optimiser state."""
    by_phase: dict[str, list[JaxprEqn]] = defaultdict(list)
    for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True):
        by_phase[phase].append(eqn)
    differentiated = [*by_phase["forward"], *by_phase["backward"]]
    read = {atom for eqn in differentiated for atom in eqn.invars if not isinstance(atom, Literal)}
    roles: dict[str, list[Var]] = defaultdict(list)
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        roles[leaf.role].append(var)
    parameters = tuple(var for var in roles["state"] if var in read)
    optimiser = tuple(var for var in roles["state"] if var not in read)
    walk = _Walk(parameters)
    walk.eqns(by_phase["forward"], 1.0)
    find = walk.classes.find
    sums: dict[Class, float] = defaultdict(float)
    for dim, size in walk.sums:
        sums[find(dim)] += size
    for dim, _, size in {(find(dim), other, size) for dim, other, size in walk.inputs}:
        sums[dim] += size
    return ModelDims(
        parameters=parameters,
        optimiser=optimiser,
        batch=frozenset(find((v, d)) for v in roles["batch"] for d in range(len(shape_of(v)))),
        products=tuple(
            Product(work, frozenset(map(find, dims)), frozenset(map(walk.tight.find, dims)))
            for work, dims in walk.products
        ),
        sums=sums,
        used=frozenset(map(find, walk.used)),
        experts=_experts(walk, parameters),
        mirrors=_mirrors(program, by_phase["update"], parameters, optimiser),
        classes=walk.classes,
        tight=walk.tight,
        produced_bytes=walk.produced_bytes,
        split=_split_sizes(walk, parameters),
    )


def _split_sizes(walk: _Walk, parameters: Sequence[Var]) -> dict[DimKey, int]:
    least: dict[Class, int] = {}
    for var, dim in walk.sizes:
        root = walk.tight.find((var, dim))
        least[root] = min(least.get(root, 1 << 62), shape_of(var)[dim])
    keys = ((var, dim) for var in parameters for dim in range(len(shape_of(var))))
    return {key: least[root] for key in keys if (root := walk.tight.find(key)) in least}


def _experts(walk: _Walk, parameters: Sequence[Var]) -> frozenset[DimKey]:
    """Return the dims of parameters, one of each, that products treat as a batch of matrices."""
    apart = {walk.tight.find(dim) for dim in walk.experts}
    keys = ((var, dim) for var in parameters for dim in range(len(shape_of(var))))
    found: dict[Var, int] = {}
    for var, dim in keys:
        if len(shape_of(var)) >= 3 and walk.tight.find((var, dim)) in apart:
            found.setdefault(var, dim)
    return frozenset(found.items())


def _mirrors(
    program: Program,
    update: Sequence[JaxprEqn],
    parameters: Sequence[Var],
    optimiser: Sequence[Var],
) -> dict[DimKey, tuple[DimKey, ...]]:
    """Return {dim of optimiser state: dims of parameters that the update carries over into it}."""
    walk = _Walk(())
    walk.eqns(update, 1.0)
    made = {var for eqn in update for var in eqn.outvars}
    for atom, alias in zip(program.jaxpr.outvars, program.aliases, strict=True):
        if alias is not None and not isinstance(atom, Literal) and atom in made:
            old = program.jaxpr.invars[alias]
            for dim in range(len(shape_of(old))):
                walk.classes.join((atom, dim), (old, dim))
    of_class: dict[Class, list[DimKey]] = defaultdict(list)
    for var in parameters:
        for dim in range(len(shape_of(var))):
            of_class[walk.classes.find((var, dim))].append((var, dim))
    return {
        (var, dim): tuple(of_class[walk.classes.find((var, dim))])
        for var in optimiser
        for dim in range(len(shape_of(var)))
    }


def _gains(model: ModelDims, size: int) -> dict[Class, float]:
    """Return W(c) - S(c) / 2 of the classes that can be cut over `size` devices, if above 0."""
    elements: dict[Class, float] = defaultdict(float)
    for var in model.parameters:
        roots = [model.classes.find((var, dim)) for dim in model._cuttable(var, size)]
        for root in dict.fromkeys(roots):  # in order, so that ties are always broken alike
            elements[root] += math.prod(shape_of(var))
    candidates = [c for c in elements if c in model.used and c not in model.batch]
    total = sum(math.prod(shape_of(var)) for var in model.parameters)
    made = model.produced_bytes or 1.0
    gains = {
        c: elements[c] / total - _SUM_WEIGHT * model.sums.get(c, 0.0) / made for c in candidates
    }
    return {c: gain for c, gain in gains.items() if gain > 0}


@cached_by_program(16)
def _chosen(model: ModelDims, size: int) -> frozenset[Class]:
    """Return the classes of the largest total gain of which no parameter has two."""
    gains = _gains(model, size)
    problem = ProblemBuilder()
    for root, gain in gains.items():
        node = problem.node(root, "class", ("whole", "cut"))
        problem.add_cost(node, np.array([gain, 0.0]))  # what is forgone
    pairs: set[tuple[int, ...]] = set()
    for var in model.parameters:
        roots = {model.classes.find((var, dim)) for dim in range(len(shape_of(var)))} & set(gains)
        numbers = sorted(problem.node(root, "class", ("whole", "cut")) for root in roots)
        pairs.update(itertools.combinations(numbers, 2))
    for first, second in sorted(pairs):
        problem.add_edge(first, second, np.array([[0.0, 0.0], [0.0, math.inf]]))
    if not gains:
        return frozenset()
    # rounds: work is counted, so that a busy machine finds the same classes
    counted = ilp_sharding.SolveOptions(rounds=60)
    found = ilp_sharding.solve(problem.build("tensor parallelism"), counted)
    assert found.choice is not None
    return frozenset(root for root, cut in zip(gains, found.choice, strict=True) if cut)


class _Walk:
    """Joins the dims that equations carry over, in bodies of regions too, and notes what they cost.

    `tight` joins a dim with what it falls into, but not with what it becomes the leading factor of
    (repeated key-value heads are cut into fewer parts than the heads they serve).
    """

    def __init__(self, parameters: Iterable[Var]) -> None:
        self.classes, self.tight = _Union(), _Union()
        self.weights = set(parameters)  # and what is computed of nothing else
        self.sums: list[tuple[DimKey, float]] = []
        self.inputs: list[tuple[DimKey, Var, float]] = []  # in front of products that make a dim
        self.products: list[tuple[float, list[DimKey]]] = []
        self.used: list[DimKey] = []
        self.experts: list[DimKey] = []
        self.sizes: set[DimKey] = set()
        self.produced_bytes = 0.0  # by products of parameters

    def eqns(self, eqns: Sequence[JaxprEqn], weight: float) -> None:
        """Walk over equations that run `weight` times a step."""
        for eqn in eqns:
            bound = bindings(eqn)
            if bound is not None:
                for outer, inner, shift in bound.values:
                    self._bind(outer, inner, shift)
                for body in bound.bodies:
                    self.eqns(body.eqns, weight * trips(eqn))
                continue
            read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            if read and all(atom in self.weights for atom in read):
                self.weights.update(eqn.outvars)
            rule = sharding_rule(eqn)
            if rule is not None:
                self._carried(eqn, rule)
                self._costs(eqn, rule, weight)

    def _bind(self, outer: Var, inner: Var, shift: int) -> None:
        if outer in self.weights:
            self.weights.add(inner)
        for dim in range(len(getattr(inner.aval, "shape", ()))):
            for union in (self.classes, self.tight):
                union.join((outer, dim + shift), (inner, dim))

    def _carried(self, eqn: JaxprEqn, rule: ShardingRule) -> None:
        """Join dims of operands and results with one leading factor."""
        leading: dict[str, list[tuple[DimKey, bool]]] = defaultdict(list)
        tensors = [
            *((atom, dims, False) for atom, dims in zip(eqn.invars, rule.operands, strict=True)),
            *((var, dims, True) for var, dims in zip(eqn.outvars, rule.results, strict=True)),
        ]
        for atom, dims, made in tensors:
            if isinstance(atom, Literal) or is_drop(atom):
                continue
            for number, names in enumerate(dims):
                if names:
                    leading[names[0]].append(((atom, number), made and len(names) > 1))
                    self.sizes.add((atom, number))
        for members in leading.values():
            (first, _), *rest = members
            for dim, merged in rest:
                self.classes.join(dim, first)
                if not merged:
                    self.tight.join(dim, first)

    def _costs(self, eqn: JaxprEqn, rule: ShardingRule, weight: float) -> None:
        """Note what is summed, moved and multiplied, by the dims that it is along."""
        made = sum(tensor_bytes(var) for var in eqn.outvars) * weight
        kinds = {factor.name: factor.kind for factor in rule.factors}
        in_result = {name for dims in rule.results for dim in dims for name in dim}
        held: dict[str, list[DimKey]] = defaultdict(list)
        for atom, dims in zip(eqn.invars, rule.operands, strict=True):
            for number, names in enumerate(dims):
                if not isinstance(atom, Literal):
                    for name in names[:1]:
                        held[name].append((atom, number))
                    if not names and shape_of(atom)[number] > 1:  # must be whole
                        self.sums.append(((atom, number), tensor_bytes(atom) * weight))
        for name, along in held.items():
            if name not in in_result or kinds[name] == "permutation":
                self.sums.append((along[0], made))
        contracted = [name for name, dims in held.items() if name not in in_result]
        if any(len({atom for atom, _ in held[name]}) > 1 for name in contracted):
            self._product(eqn, held, in_result, weight)
        elif contracted and len(eqn.invars) > 1:  # a lookup
            self.used.extend(held[name][0] for name in contracted)

    def _product(
        self, eqn: JaxprEqn, held: Mapping[str, list[DimKey]], kept: set[str], weight: float
    ) -> None:
        factors = [dims[0] for dims in held.values()]
        self.products.append((flops(eqn) * weight, factors))
        self.used.extend(factors)
        activations = {
            atom
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom not in self.weights
        }
        if any(atom in self.weights for dims in held.values() for atom, _ in dims):
            self.produced_bytes += tensor_bytes(eqn.outvars[0]) * weight
        for name, dims in held.items():
            atoms = {atom for atom, _ in dims}
            if (len(atoms) > 1) == (name in kept):  # a batch of matrices, or a group's matrix
                self.experts.extend(dim for dim in dims if dim[0] in self.weights)
            elif name in kept:
                for other in activations - atoms:
                    self.inputs.append((dims[0], other, tensor_bytes(other) * weight))
