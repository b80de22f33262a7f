"""The calls of one step: as calls of a pure function of arrays, told apart, and traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
from attrs import evolve

from alpa_interchange import ClusterSpec
from alpa_meta.compat import trace_settings
from alpa_meta.options import Options
from alpa_meta.planning.batch_search import batch_dims_of
from alpa_meta.step.arguments import abstract_arguments, check_positions, is_array
from alpa_meta.step.batch_dims import BatchDims, examples_first, moved_pins
from alpa_meta.step.program import Step
from alpa_meta.step.pure_call import PureCall, pure_call
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.types import Function, PyTree


class Calls:
    """The calls of `function`; steps are traced once as long as nothing else is asked for."""

    def __init__(self, function: Function[PyTree]) -> None:
        self._function = function
        self._dims: dict[Hashable, BatchDims] = {}
        self._traced: tuple[Hashable, Step] | None = None

    def pure(
        self, args: Sequence[PyTree], options: Options, cluster: Callable[[], ClusterSpec]
    ) -> PureCall:
        """Return the call of a pure function whose batch has its examples along dim 0."""
        batch, static = options.batch_argnums, options.static_argnums
        check_positions(self._function, len(args), batch_argnums=batch, static_argnums=static)
        call = pure_call(self._function, args, static)
        leaves, tree = jax.tree.flatten(_traced_arguments(call, static))
        kind = tree, tuple(len(getattr(leaf, "shape", ())) for leaf in leaves)
        if kind not in self._dims:
            made: dict[BatchDims, Step] = {(): self.traced(call, options)}

            def moved(dims: BatchDims) -> Step:
                made[dims] = _step(examples_first(call, dims, static), options)
                return made[dims]

            found = batch_dims_of(made[()], cluster, options, moved)
            self._dims[kind] = found
            self._traced = call_key(examples_first(call, found, static), static), made[found]
        return examples_first(call, self._dims[kind], static)

    def traced(self, call: PureCall, options: Options) -> Step:
        """Return the step at the shapes of a call."""
        key = call_key(call, options.static_argnums)
        if self._traced is None or self._traced[0] != key:
            self._traced = key, _step(call, options)
        return self._traced[1]


def options_for(step: Step, options: Options) -> Options:
    """Return options of a step as it was given as those of `step`, whose dims may be moved."""
    pins = moved_pins(options.pins, step)
    return options if pins == options.pins else evolve(options, pins=pins)


def _step(call: PureCall, options: Options) -> Step:
    slices = options.slice_request
    if options.plan is not None:
        slices = SliceRequest(options.plan.program.token_slices)
    return Step(
        call.function,
        abstract_arguments(call.args, options.static_argnums),
        options.batch_argnums,
        options.static_argnums,
        options.exact,
        options.offload == "moments",
        slices,
        call.batch_dims,
    )


def call_key(call: PureCall, static_argnums: Sequence[int]) -> Hashable:
    """Return what a plan depends on of a call."""
    leaves, tree = jax.tree.flatten(_traced_arguments(call, static_argnums))
    static = tuple(call.args[k] for k in static_argnums if k < len(call.args))
    return tree, tuple(map(_leaf_key, leaves)), static, call.key, trace_settings()


def _traced_arguments(call: PureCall, static_argnums: Sequence[int]) -> PyTree:
    return tuple(None if k in static_argnums else arg for k, arg in enumerate(call.args))


def _leaf_key(leaf: PyTree) -> object:
    """Return what a plan depends on of a leaf: of what is no array, all."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return tuple(leaf.shape), str(leaf.dtype)
    return type(leaf) if is_array(leaf) or not isinstance(leaf, Hashable) else leaf
