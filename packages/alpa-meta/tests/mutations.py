"""Changes of JSON documents that an attacker or a broken disk might make."""

import copy
import json
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**40, 0.5, -1e308, 1e-320, "", "x", "\x00", "🙂" * 40,
    "__class__", [], {}, [[]], [None], {"": 0}, [-1], [10**9], {"schema": "ParallelPlan"},
    [[[[[[[[1]]]]]]]], "9" * 5000, list(range(300)),
)  # fmt: skip


def mutated(text, random):
    """Return the JSON text of a document with one to three changes."""
    changed = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        changed = _changed(changed, random)
    text = json.dumps(changed)
    if random.random() < 0.15:
        text = _damaged(text, random)
    return text


def _changed(document, random):
    holder, key = _place(document, random)
    if holder is None:
        return random.choice(ODD_VALUES)
    kind = random.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[random.randrange(len(holder))]))
    elif kind == 2 and isinstance(holder, list):
        other = random.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 3 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * random.choice((-1, 0, 2, 10**6)) + random.choice((-1, 0, 1))
    elif kind == 4:
        other, name = _place(document, random)
        if other is not None:
            holder[key] = copy.deepcopy(other[name])
    elif kind == 5 and isinstance(holder, dict):
        holder[random.choice(("", "unknown", "value", str(key) + "s"))] = holder[key]
    else:
        holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return document


def _place(document, random):
    """Return (container, key) of a random value."""
    holder, key, value = None, None, document
    while isinstance(value, (dict, list)) and value and (holder is None or random.random() < 0.85):
        holder = value
        key = (
            random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        )
        value = value[key]
    return holder, key


def _damaged(text, random):
    at = random.randrange(len(text) + 1)
    return random.choice(
        (
            text[:at],
            text[:at] + chr(random.randrange(1, 0x2FF)) + text[at + 1 :],
            text[:at] + "[" * random.choice((1, 100, 100_000)) + text[at:],
            text[:at] + '"' * random.choice((1, 2)) + text[at:],
            text[:at] + text[at + 1 :],
        )
    )
