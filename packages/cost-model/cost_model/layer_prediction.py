"""Predicted time of the calibration's transformer layer, kernel by kernel."""

from __future__ import annotations

from cost_model.arithmetic import product_arithmetic
from cost_model.kernel import seconds
from cost_model.profile import Profile, Sample


def layer_seconds(profile: Profile, sample: Sample) -> float:
    """Return the predicted seconds of a `layer-forward` or `layer-both` sample of `profile`.

    Six matmuls, the softmax, two norms, one activation and two residual sums, as XLA fuses them;
    the backward pass runs every matmul twice and moves twice the bytes. With float8 operands the
    rest is bfloat16, and what a product of weights takes is read and narrowed first.
    """
    batch, seq, hidden = sample.shape
    tokens, heads = batch * seq, max(1, hidden // 64)
    width = 4 if sample.dtype == "float32" else 2
    states = float(tokens * hidden * width)
    scores = float(batch * heads * seq * seq * width)
    matmuls = [
        ("matmul", (tokens, 3 * hidden, hidden)),
        ("matmul", (tokens, hidden, hidden)),
        ("matmul", (tokens, 4 * hidden, hidden)),
        ("matmul", (tokens, hidden, 4 * hidden)),
        ("attention", (batch * heads, seq, seq, 64)),
        ("attention", (batch * heads, seq, 64, seq)),
    ]
    others = [
        ("softmax", 3 * scores), ("normalisation", 3 * states), ("normalisation", 3 * states),
        ("elementwise", 8 * states), ("elementwise", 3 * states), ("elementwise", 3 * states),
    ]  # fmt: skip
    narrow = sample.dtype.startswith("float8")
    if narrow:
        operands = [m * k + k * n for kind, (m, n, k) in matmuls[:4]]
        others += [("elementwise", 3.0 * count) for count in operands]
    device, efficiency = profile.device, profile.efficiency
    alone = "bfloat16" if narrow else sample.dtype
    forward, backward = 0.0, 0.0
    for kind, shape in matmuls:
        *group, m, n, k = shape
        many = group[0] if group else 1
        flops = 2.0 * many * m * n * k
        dtype = sample.dtype if kind == "matmul" else alone
        taken = 1 if dtype != alone else width
        bytes = float(many * (taken * (m * k + k * n) + width * m * n))
        arithmetic, _ = product_arithmetic(dtype, "default", device.platform)
        time = seconds(device, efficiency, flops, bytes, arithmetic, kind, shape)
        forward += time
        backward += 2 * time
    for kind, bytes in others:
        time = seconds(device, efficiency, 0.0, bytes, alone, kind)
        forward += time
        backward += 2 * time
    return forward if sample.name == "layer-forward" else forward + backward
