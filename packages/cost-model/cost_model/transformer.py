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
    window: int | None = None  # tokens that every second layer attends to; None: all
    experts: int = 0  # routed experts of a layer; 0: dense layers only
    experts_per_token: int = 1
    expert_width: int = 0  # feed-forward width of one expert
    shared_width: int = 0  # feed-forward width that every token takes beside its experts
    dense_layers: int = 0  # first layers that have no experts
    # multi-head latent attention (DeepSeek-V2): low-rank sizes of queries and of keys and values,
    # and the size of the rotary part that queries and keys have beside `head_size`
    query_rank: int = 0
    kv_rank: int = 0
    rotary_size: int = 0

    @property
    def mlp_width(self) -> int:
        return self.feedforward or 4 * self.hidden

    @property
    def depth(self) -> int:
        """Return the size of one head's values."""
        return self.head_size or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        return self.heads * self.depth

    @property
    def qkv_width(self) -> int:
        """Return the columns of queries, keys and values of all heads."""
        if self.kv_rank:
            return self.heads * (2 * (self.depth + self.rotary_size) + self.depth)
        return self.attention_width + 2 * (self.kv_heads or self.heads) * self.depth

    @property
    def projections(self) -> tuple[tuple[int, int, bool], ...]:
        """Return (rows, columns, whether heads divide them) of the matrices before attention."""
        if not self.kv_rank:
            return ((self.hidden, self.qkv_width, True),)
        query, rows = self.heads * (self.depth + self.rotary_size), self.query_rank or self.hidden
        down = ((self.hidden, self.query_rank, False),) if self.query_rank else ()
        return (
            *down,
            (rows, query, True),
            (self.hidden, self.kv_rank + self.rotary_size, False),
            (self.kv_rank, 2 * self.attention_width, True),
        )

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all routed experts of one layer."""
        return self.experts * (3 if self.gated else 2) * self.hidden * self.expert_width

    @property
    def attention_parameters(self) -> int:
        """Return the attention's matrices of one layer."""
        before = sum(rows * columns for rows, columns, _ in self.projections)
        return before + self.attention_width * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of a dense layer."""
        mlp = (3 if self.gated else 2) * self.hidden * self.mlp_width
        biases = 0 if self.gated else self.qkv_width + 2 * self.hidden + self.mlp_width
        norms = (2 if self.gated else 4) * self.hidden
        return self.attention_parameters + mlp + biases + norms

    @property
    def sparse_layer_parameters(self) -> int:
        """Return the parameters of a layer of experts without those of the routed experts."""
        shared = (3 if self.gated else 2) * self.hidden * self.shared_width
        return self.attention_parameters + shared + self.hidden * (self.experts + 2)

    @property
    def parameters(self) -> int:
        """Return all parameters, the embedding counted once when tied."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = 0 if self.gated else self.seq * self.hidden
        sparse = self.expert_layers * (self.sparse_layer_parameters + self.expert_parameters)
        dense = (self.layers - self.expert_layers) * self.layer_parameters
        return dense + sparse + embeddings + positions


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
    routed_bytes: float = 0.0  # tokens that one device sends to the experts


@functools.lru_cache(maxsize=16384)
def layer_work(
    model: TransformerSpec,
    micro_batch: int,
    tensor: int = 1,
    context: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
    expert: int = 0,
) -> LayerWork:
    """Return the forward work of one layer on one device.

    The tensor-parallel split is Megatron's: attention heads and MLP columns over `tensor` devices;
    the hidden state is whole on each unless `sequence_parallel`. A fused attention kernel never
    writes the score matrices and skips the masked half. With `expert` the layer has experts, cut
    over as many devices; the tokens are taken as balanced between them.
    """
    tokens = micro_batch * model.seq / context
    hidden, width = model.hidden, model.mlp_width / tensor
    heads, depth = max(1.0, model.heads / tensor), model.depth
    gates = 2 if model.gated else 1
    matmuls = [
        Matmul(kind="matmul", batch=1, m=tokens, n=columns / (tensor if cut else 1), k=rows)
        for rows, columns, cut in model.projections
    ]
    matmuls.append(
        Matmul(kind="matmul", batch=1, m=tokens, n=hidden, k=model.attention_width / tensor)
    )
    mlp_width, routed = width, 0.0
    if expert:
        mine = tokens / (tensor if sequence_parallel else 1)  # expert layers cut the tokens
        local = max(1, model.experts // expert)
        rows = mine * model.experts_per_token / local
        for columns, depth_of in (
            (model.expert_width * gates, hidden),
            (hidden, model.expert_width),
        ):
            matmuls.append(Matmul(kind="grouped", batch=local, m=rows, n=columns, k=depth_of))
        routed = mine * model.experts_per_token * hidden * 2.0
        mlp_width = model.shared_width / tensor
    if mlp_width:
        matmuls.append(Matmul(kind="matmul", batch=1, m=tokens, n=mlp_width * gates, k=hidden))
        matmuls.append(Matmul(kind="matmul", batch=1, m=tokens, n=hidden, k=mlp_width))
    batch, rows = int(micro_batch * heads), model.seq / context
    if not fused_attention:
        matmuls += [
            Matmul(kind="attention", batch=batch, m=rows, n=model.seq, k=depth),
            Matmul(kind="attention", batch=batch, m=rows, n=depth, k=model.seq),
        ]
    share = 0.5 if fused_attention else 1.0
    seen = float(model.seq)
    if model.window is not None and fused_attention:  # half of the layers see a window only
        seen = 0.5 * (model.seq + 2 * min(model.window, model.seq))
    score_depth = depth + model.rotary_size
    attention_flops = share * 2.0 * batch * rows * seen * (score_depth + depth)
    states = tokens * hidden / (tensor if sequence_parallel else 1)
    # two normalisations (read, write), two residual additions (two reads, write) with dropout masks
    norm_bytes = states * (2 * 4 + 2 * 6 + (0 if model.gated else 2))
    mlp_bytes = tokens * mlp_width * (3 if model.gated else 2) * 2
    if expert:  # tokens are sorted by expert and back: read, written, weighted and added
        active = routed / (2.0 * hidden)
        mlp_bytes += active * model.expert_width * (3 if model.gated else 2) * 2 + 6 * routed
    qkv_bytes = tokens * model.qkv_width / tensor * 4
    # scores: scale and mask, softmax, dropout each read and write two bytes; one of dropout mask
    score_bytes = 0.0 if fused_attention else batch * rows * model.seq * (3 * 4 + 1)
    return LayerWork(
        matmuls=tuple(matmuls),
        attention_flops=attention_flops,
        memory_bytes=norm_bytes + mlp_bytes + qkv_bytes + score_bytes,
        attention_bytes=score_bytes,
        hidden_bytes=2.0 * tokens * hidden,
        routed_bytes=routed,
    )


def layer_flops(model: TransformerSpec, batch: int) -> float:
    """Return the matmul FLOPs of a mean layer's forward pass over `batch` sequences."""
    tokens, matrices = batch * model.seq, 3 if model.gated else 2
    mlp = float(matrices * model.hidden * model.mlp_width)
    if model.experts:
        active = model.experts_per_token * model.expert_width + model.shared_width
        sparse = model.hidden * (matrices * active + model.experts)
        share = model.expert_layers / model.layers
        mlp = (1 - share) * mlp + share * sparse
    scores = 2.0 * tokens * model.seq * model.heads * (2 * model.depth + model.rotary_size)
    return 2.0 * tokens * (model.attention_parameters + mlp) + scores


def step_flops(
    model: TransformerSpec, global_batch: int, recompute: str = "none"
) -> tuple[float, float]:
    """Return (model FLOPs, hardware FLOPs) of one training step.

    The first counts forward and backward once (for MFU); the second adds what `recompute` repeats:
    "full" a forward pass of every layer, "selective" the two attention products (for HFU).
    """
    layer = float(layer_flops(model, global_batch))
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
