"""What training programs do with the layers, the traffic and the memory of a step.

These are properties of the software, stated by its source, not fitted:

    megatron-deepspeed  Megatron-LM until 2022 and its DeepSpeed fork: half-precision gradients are
                        reduced after the last backward pass (`allreduce_gradients`); each device of
                        a stage sends its part of the hidden state, which the next stage gathers
                        (`scatter_gather_tensors_in_pipeline`)
    megatron            Megatron Core: buckets of single-precision gradients are reduced while the
                        last microbatch runs backward (`overlap_grad_reduce`)
    nanotron            PyTorch DDP buckets of 25 MB over single-precision accumulators; stages are
                        cut by the parameters of layers and output matrix (`build_model`), and the
                        loss is in the stage after the one that the output matrix fills; a sharded
                        optimiser scatters the gradients after the last backward pass; collectives
                        of tensor parallelism run on a stream of their own
                        (`tp_linear_async_communication`); every tensor is updated by itself
    megatron-bridge     Megatron Core as NeMo's recipes run it: CUDA graphs, eight- and four-bit
                        products, fused kernels
    megatron-bridge-2606  the same from release 26.06 on: layers of experts in block-scaled eight
                        bits, on devices with units for them, are 1.17 to 1.56 times as quick
    sailor              Sailor's runtime (a fork of Megatron-DeepSpeed) with stages as it plans them
    fsdp                PyTorch FSDP: parameters are gathered a layer ahead in both passes and
                        gradients scattered a layer behind, for every microbatch
    xla                 this project: one compiled program; no kernel waits for its launch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen, validators


@frozen(kw_only=True)
class Executor:
    """One training program; bytes are per parameter."""

    fitted_as: str  # whose constants describe it
    balance: str = field(default="layers", validator=validators.in_(("layers", "cost")))
    weightless_blocks: int = 0  # after the output matrix: each may take a stage of its own
    overlapped_tensor: bool = False  # whether products run beside tensor-parallel collectives
    scattered_messages: bool = False  # whether stages send a part of the hidden state per device
    fused_experts: bool = False  # whether layers of experts in MXFP8 have kernels of their own
    tensorwise_update: bool = False  # whether the optimiser launches its kernels tensor by tensor
    reduced_bytes: float = 4.0  # of a gradient as it is reduced
    # levels of `TrainingRun.zero_stage` whose reduction runs beside the last backward pass
    overlapped_gradients: tuple[int, ...] = (0, 1, 2)
    gathers_ahead: bool = False  # whether sharded parameters are gathered beside the layer before
    accumulated_bytes: float = 4.0  # gradients held while microbatches are added up
    master_bytes: float = 12.0  # optimiser state: a copy of the parameter and two moments
    compiled: bool = False
    profiled: bool = False  # whether `layer_table` was measured with it


EXECUTORS: Mapping[str, Executor] = {
    "megatron-deepspeed": Executor(
        fitted_as="megatron-deepspeed",
        scattered_messages=True,
        reduced_bytes=2.0,
        overlapped_gradients=(),
    ),
    "megatron": Executor(fitted_as="megatron"),
    "megatron-bridge": Executor(fitted_as="megatron-bridge"),
    "megatron-bridge-2606": Executor(fitted_as="megatron-bridge", fused_experts=True),
    "sailor": Executor(
        fitted_as="sailor", reduced_bytes=2.0, overlapped_gradients=(), profiled=True
    ),
    "nanotron": Executor(
        fitted_as="nanotron",
        balance="cost",
        weightless_blocks=2,
        overlapped_tensor=True,
        tensorwise_update=True,
        overlapped_gradients=(0,),
    ),
    "fsdp": Executor(fitted_as="fsdp", reduced_bytes=2.0, gathers_ahead=True),
    "xla": Executor(
        fitted_as="megatron-deepspeed", compiled=True, reduced_bytes=2.0, overlapped_gradients=()
    ),
}


def stages_by_cost(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the stage of every block when stages are filled in order to equal shares of the cost.

    A block belongs to the stage that is open; a stage is closed by the block that takes the sum of
    all costs so far above its share (nanotron's `build_model`). The last stages may stay empty.
    """
    total, done, stage, found = sum(costs), 0.0, 0, []
    for cost in costs:
        found.append(stage)
        done += cost
        if done > total * (stage + 1) / num_stages and stage + 1 < num_stages:
            stage += 1
    return tuple(found)
