"""How a step of the solver ends without a result of its own; `solve` lets none of them out."""


class OutOfTime(Exception):
    """The deadline came before the answer."""


class NoAssignment(Exception):
    """Every choice uses a forbidden strategy or pair."""
