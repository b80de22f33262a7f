"""Kernels of one transformer layer, and its parameters, FLOPs and activations.

Symbols as in Korthikanti et al. (2022): s sequence, b microbatch, h hidden, f feed-forward, a
heads, d head size, t tensor-parallel size, c context-parallel size, v vocabulary. Per layer and
microbatch:

    matmul FLOPs, forward   2 s b (h (a + 2 k) d + a d h + g h f) + 4 s s b a d w -> layer_flops()
    activations, in bytes   s b h (34 + 5 a s / h)                           -> activation_bytes()

with k key-value heads, g = 2 matmuls of the MLP (3 when gated), and w = 1/2 where a causal
attention kernel skips masked blocks.
"""

from __future__ import annotations

import functools

from attrs import field, frozen

from alpa_interchange.check import positive


@frozen(kw_only=True)
class TransformerSpec:
    """A decoder-only transformer."""

    hidden: int = field(validator=positive)
    layers: int = field(validator=positive)
    heads: int = field(validator=positive)
    seq: int = field(validator=positive)
    vocab: int = field(default=51200, validator=positive)
    feedforward: int | None = None  # None: 4 x hidden
    head_size: int | None = None  # None: hidden / heads
    kv_heads: int | None = None  # None: as many as heads
    gated: bool = False  # three matmuls in the MLP (SwiGLU) and no dropout, as in Llama
    tied: bool = True  # input embedding and output matrix are one parameter

    @property
    def mlp_width(self) -> int:
        return self.feedforward or 4 * self.hidden

    @property
    def attention_width(self) -> int:
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def qkv_width(self) -> int:
        kv = self.kv_heads or self.heads
        return self.attention_width + 2 * kv * (self.attention_width // self.heads)

    @property
    def layer_parameters(self) -> int:
        mlp = (3 if self.gated else 2) * self.hidden * self.mlp_width
        biases = 0 if self.gated else self.qkv_width + 2 * self.hidden + self.mlp_width
        norms = (2 if self.gated else 4) * self.hidden
        return self.hidden * (self.qkv_width + self.attention_width) + mlp + biases + norms

    @property
    def parameters(self) -> int:
        """Return all parameters, the embedding counted once when tied."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = 0 if self.gated else self.seq * self.hidden
        return self.layers * self.layer_parameters + embeddings + positions


@frozen(kw_only=True)
class Matmul:
    """`count` equal matmuls [batch] x (m, n, k) of one forward pass."""

    kind: str  # "matmul" or "attention"
    batch: int
    m: float
    n: float
    k: float

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@frozen(kw_only=True)
class LayerWork:
    """What one device computes in the forward pass of one layer on one microbatch."""

    matmuls: tuple[Matmul, ...]
    attention_flops: float  # of the score and context products, masked blocks skipped when fused
    memory_bytes: float  # read and written by everything that is not a matmul
    attention_bytes: float  # of which the score matrices (mask, softmax, dropout)
    hidden_bytes: float  # one hidden state of the microbatch, [b, s, h] in half precision


@functools.lru_cache(maxsize=16384)
def layer_work(
    model: TransformerSpec,
    micro_batch: int,
    tensor: int = 1,
    context: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
) -> LayerWork:
    """Return the forward work of one layer on one device.

    The tensor-parallel split is Megatron's: attention heads and MLP columns over `tensor` devices;
    the hidden state is whole on each unless `sequence_parallel`. A fused attention kernel never
    writes the score matrices and skips the masked half.
    """
    tokens = micro_batch * model.seq / context
    hidden, width = model.hidden, model.mlp_width / tensor
    heads = max(1.0, model.heads / tensor)
    depth = model.attention_width / model.heads
    matmuls = [
        Matmul(kind="matmul", batch=1, m=tokens, n=model.qkv_width / tensor, k=hidden),
        Matmul(kind="matmul", batch=1, m=tokens, n=hidden, k=model.attention_width / tensor),
        Matmul(kind="matmul", batch=1, m=tokens, n=width * (2 if model.gated else 1), k=hidden),
        Matmul(kind="matmul", batch=1, m=tokens, n=hidden, k=width),
    ]
    batch = int(micro_batch * heads)
    rows = model.seq / context
    if not fused_attention:
        matmuls += [
            Matmul(kind="attention", batch=batch, m=rows, n=model.seq, k=depth),
            Matmul(kind="attention", batch=batch, m=rows, n=depth, k=model.seq),
        ]
    share = 0.5 if fused_attention else 1.0
    attention_flops = share * 4.0 * batch * rows * model.seq * depth
    states = tokens * hidden / (tensor if sequence_parallel else 1)
    # two normalisations (read, write), two residual additions (two reads, write) with dropout masks
    norm_bytes = states * (2 * 4 + 2 * 6 + (0 if model.gated else 2))
    mlp_bytes = tokens * width * (3 if model.gated else 2) * 2
    qkv_bytes = tokens * model.qkv_width / tensor * 4
    # scores: scale and mask, softmax, dropout each read and write two bytes; one of dropout mask
    score_bytes = 0.0 if fused_attention else batch * rows * model.seq * (3 * 4 + 1)
    return LayerWork(
        matmuls=tuple(matmuls),
        attention_flops=attention_flops,
        memory_bytes=norm_bytes + mlp_bytes + qkv_bytes + score_bytes,
        attention_bytes=score_bytes,
        hidden_bytes=2.0 * tokens * hidden,
    )


def layer_flops(model: TransformerSpec, batch: int) -> float:
    """Return the matmul FLOPs of one forward pass of one layer over `batch` sequences."""
    tokens = batch * model.seq
    mlp = (3 if model.gated else 2) * model.hidden * model.mlp_width
    projections = model.hidden * (model.qkv_width + model.attention_width) + mlp
    return 2.0 * tokens * projections + 4.0 * tokens * model.seq * model.attention_width


def step_flops(
    model: TransformerSpec, global_batch: int, recompute: str = "none"
) -> tuple[float, float]:
    """Return (model FLOPs, hardware FLOPs) of one training step.

    The first counts forward and backward once (for MFU); the second adds what `recompute` repeats:
    "full" a forward pass of every layer, "selective" the two attention products (for HFU).
    """
    layer = layer_flops(model, global_batch)
    head = 2.0 * global_batch * model.seq * model.hidden * model.vocab
    useful = 3.0 * (model.layers * layer + head)
    attention = 4.0 * global_batch * model.seq * model.seq * model.attention_width
    again = {"none": 0.0, "selective": attention, "full": layer}[recompute]
    return useful, useful + model.layers * again


def activation_bytes(
    model: TransformerSpec,
    micro_batch: int,
    tensor: int = 1,
    context: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    fused_attention: bool = False,
) -> float:
    """Return the bytes that one layer keeps on one device for the backward pass of a microbatch.

    Korthikanti et al. (2022), equations 1-6, with the feed-forward width and gating as parameters:
    for h, 4 h and no parallelism s b h (34 + 5 a s / h).
    """
    tokens = micro_batch * model.seq / context
    sbh = tokens * model.hidden
    if recompute == "full":
        return 2.0 * sbh / (tensor if sequence_parallel else 1)
    attention = tokens * model.attention_width
    kv = tokens * (model.qkv_width - model.attention_width)
    dropout = 0.0 if model.gated else 1.0
    # whole on every tensor-parallel device: inputs of two norms, of two matmul pairs, two masks
    whole = sbh * (2 * 2 + 2 * 2 + 2 * dropout)
    mlp = tokens * model.mlp_width * 2 * (3 if model.gated else 2)
    split = 2 * attention + 2 * kv + 2 * attention + mlp
    scores = 0.0
    if recompute == "none" and not fused_attention:
        scores = micro_batch * model.heads * model.seq * (model.seq / context) * (4 + dropout)
    if sequence_parallel:
        whole /= tensor
    return whole + (split + scores) / tensor
