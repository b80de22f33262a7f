"""All that is known of operators: what may be sharded, how it then runs on each device, what it
costs, how its results follow the batch.

A file per family of operators; each ends in a table `OPERATORS` from primitive name to its record.
A new operator is one entry, or a call of `register`; no other folder knows an operator by name.
"""

from alpa_meta.operators.layout import counted_dim
from alpa_meta.operators.operator import Factors, LocalCall, Operator
from alpa_meta.operators.registry import (
    flops,
    is_heavy,
    is_known,
    kernel_kind,
    known_primitives,
    linear_operands,
    operator_of,
    operator_signature,
    reads_windows,
    register,
    rule_number,
    sharding_rule,
    traffic_bytes,
)

__all__ = [
    "Factors",
    "LocalCall",
    "Operator",
    "counted_dim",
    "flops",
    "is_heavy",
    "is_known",
    "kernel_kind",
    "known_primitives",
    "linear_operands",
    "operator_of",
    "operator_signature",
    "reads_windows",
    "register",
    "rule_number",
    "sharding_rule",
    "traffic_bytes",
]
