"""What measurements of training steps fix, by executor (`cost_model.step_fit`)."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StepConstants:
    """What measurements fix: shares of peak, seconds, and bytes per element; all above 0."""

    matmul_share: float = 0.85  # of peak, for large aligned matmuls
    half_depth: float = 128.0  # contracted size at half efficiency
    half_columns: float = 256.0  # result columns at half efficiency
    attention_share: float = 0.35  # of peak, score and context products written to memory
    fused_attention_share: float = 0.45  # of peak, FlashAttention-2, forward and backward
    memory_share: float = 0.75  # of memory bandwidth, for non-matmul kernels
    backward_memory: float = 1.8  # non-matmul traffic of the backward pass over the forward's
    unfused_memory: float = 1.5  # non-matmul traffic without fused kernels over with them
    launch: float = 2.9e-3  # host seconds per layer, forward and backward
    launch_collective: float = 4e-4  # host seconds per layer more with tensor parallelism
    launch_group: float = 2e-4  # host seconds per layer more for each doubling of its group
    # the same more for each tensor-parallel device while stages on other hosts exchange messages
    launch_staged: float = 1e-5
    launch_recompute: float = 0.33  # host seconds of a repeated forward over forward and backward
    sharpness: float = 6.0  # exponent of the smooth maximum of kernels and launches
    head: float = 1.0  # output matrix and loss: multiple of the roofline
    loss: float = 1.0  # multiple of that for the loss alone
    embedding: float = 1e-9  # seconds per element of the embedded tokens, backward
    microbatch: float = 2e-3  # seconds per microbatch outside layers
    tensor_bandwidth: float = 0.9  # of the link fit, for tensor-parallel collectives
    tensor_latency: float = 2e-5  # seconds per tensor-parallel collective
    # share of a tensor-parallel collective's bytes that products beside it do not hide
    tensor_exposed: float = 0.5
    pipeline_latency: float = 1e-4  # seconds per transfer between stages
    pipeline_bandwidth: float = 0.8  # of the link, for transfers between stages
    pipeline_exposed: float = 0.2  # share of steady-state transfers that stages wait for
    context_exposed: float = 0.3  # share of the key-value ring that attention does not hide
    gradient_bandwidth: float = 0.7  # of the link fit, for gradient reductions
    gradient_latency: float = 1e-4  # seconds per doubling of the data-parallel group
    sharded_exposed: float = 1.0  # the same of scattering gradients and gathering parameters
    # collectives per layer of scattering gradients and gathering parameters tensor by tensor
    sharded_calls: float = 1.0
    fabric_bandwidth: float = 1.0  # of the link, for collectives that leave a host
    fabric_tensor: float = 1.0  # of that, for tensor parallelism over hosts
    fabric_latency: float = 1.0  # multiple of the link's latency for the same
    expert_exposed: float = 1.0  # share of the experts' all-to-all that computation does not hide
    grouped_share: float = 0.6  # of a plain matmul's rate, products of many small experts
    # rows of an expert at half that rate; 210 to 450 for SimuMax's operators on B200 (108 shapes of
    # 154 to 9,832 rows), from where it is fitted for Megatron Core. With kernels as Megatron
    # Bridge has them no loss is seen
    grouped_rows: float = 0.0
    fused_experts: float = 0.8  # of the time of a layer of experts, with kernels made for them
    scaling: float = 1.0  # multiple of the traffic of scaling to eight or four bits
    gradient_exposed: float = 0.9  # share of the reduction that computation does not hide
    optimizer_bytes: float = 40.0  # memory traffic of the update per parameter
    step: float = 3e-3  # seconds per step
    step_layer: float = 3e-4  # host seconds per layer of a stage to update its tensors
    # seconds per microbatch of a run whose memory is nearly full, while the allocator gives blocks
    # back and asks for others; 0 where no such run was measured
    reclaim: float = 0.0
    # seconds that every receive of a pipeline takes longer where the network between hosts stalls,
    # which few configurations tell (`step_terms.stalls`); used to fit, and to predict those
    stall: float = 0.0
