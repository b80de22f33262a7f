"""Sharding rules: what may be sharded in each operator, and how it then runs on each device.

A file per family of operators; each ends in a table `OPERATORS` from primitive name to its rule and
its local form. A new operator is one entry, or a call of `register`.
"""

from alpa_meta.operators.operator import Factors, LocalCall, Operator
from alpa_meta.operators.registry import (
    is_heavy,
    known_primitives,
    linear_operands,
    operator_of,
    operator_signature,
    register,
    rule_number,
    sharding_rule,
)
from alpa_meta.operators.work import flops, traffic_bytes

__all__ = [
    "Factors",
    "LocalCall",
    "Operator",
    "flops",
    "is_heavy",
    "known_primitives",
    "linear_operands",
    "operator_of",
    "operator_signature",
    "register",
    "rule_number",
    "sharding_rule",
    "traffic_bytes",
]
