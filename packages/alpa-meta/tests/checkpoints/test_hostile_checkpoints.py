"""Checkpoints made to do harm: each is refused by `CheckpointError`, and nothing is read for it."""

import json
import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_interchange import from_json
from alpa_meta.checkpoints.manifest import CheckpointManifest

STATE = {
    "w": jnp.ones((4, 3)),
    "key": jax.random.key(0),
    "numbers": [3, 2.5, True, 1j, 1 << 80, "text"],
    "half": jnp.zeros(2, jnp.bfloat16),
}
VALUES: tuple[Any, ...] = (
    *(None, "", "x", "0", "nan", "1e400", "9" * 6000, "[" * 10**5, "\0", "../x", "\ud800"),
    *("object", "float32", "uint32", "int4", "U9999999", "datetime64[s]", "V8"),
    *("array", "key", "int", "complex", "bool", "str", "threefry2x32", "rbg", "nope"),
    *([], [1], [-1], [1 << 40], [2], [4, 3, 1], ["w", "x"], ["[0]"], ["[999999999]"]),
    *(0, 1, -1, 1 << 62, True, {}, {"a": 1}),
)


def saved(folder):
    return alpa.save(folder, STATE, step=1, settings={"a": 1}).wait()


def seal(path, document):
    """Write a manifest with the sum that belongs to it, as an attacker would; False if it is none
    by its types."""
    try:
        manifest = from_json(json.dumps(document), CheckpointManifest)
    except ValueError:
        return False
    (path / "alpa.json").write_text(manifest.sealed())
    return True


def changed(document, rng):
    """Return a manifest of which a few fields are another's, or nonsense."""
    document = json.loads(json.dumps(document))
    value = document["value"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.75:
            field = rng.choice(("path", "keys", "kind", "name", "dtype", "shape", "impl", "value"))
            others = [leaf[field] for leaf in value["leaves"] if field in leaf]
            new = rng.choice(VALUES if rng.random() < 0.7 or not others else others)
            rng.choice(value["leaves"])[field] = new
        elif kind < 0.85:
            value["settings"] = rng.choice(VALUES)
        elif kind < 0.95:
            rng.choice(value["files"])[rng.choice(("path", "size", "sha256"))] = rng.choice(VALUES)
        else:
            value["leaves"].append(rng.choice(value["leaves"]))
    return document


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(seed=1)
def test_a_manifest_changed_anywhere_is_refused_or_read_and_raises_nothing_else(tmp_path, seed):
    path, rng = saved(tmp_path), random.Random(seed)
    document = json.loads((path / "alpa.json").read_text())
    refused = sound = 0
    while refused < 100:
        if not seal(path, changed(document, rng)):
            continue
        for like in (None, STATE):
            try:
                found = alpa.read_checkpoint(tmp_path)
                assert isinstance(found.settings, dict)
                found.restore(like)
                sound += 1
            except alpa.CheckpointError:
                refused += 1
    assert sound  # a path that is another's, say


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": "[" * 10**5}, "its settings are no JSON: nested too deeply"),
        ({"settings": "[1]"}, "its settings are a list"),
        ({"settings": ""}, "its settings are no JSON"),
        ({"leaf": {"kind": "code"}}, "of the unknown kind 'code'"),
        ({"leaf": {"kind": "int", "value": "9" * 6000}}, "which has no int as its value"),
        ({"leaf": {"dtype": "object"}}, r"an array that nothing can hold: object.4, 3."),
        ({"leaf": {"shape": [-4, -3]}}, "an array that nothing can hold: float32"),
        ({"leaf": {"value": "1"}}, "or with a value beside it"),
        ({"leaf": {"kind": "int", "value": "1"}}, r"a int that is an array: float32.4, 3."),
        ({"leaf": {"kind": "key", "impl": "nope"}}, "which cannot be random keys 'nope'"),
        ({"leaf": {"kind": "key", "impl": "threefry2x32"}}, "its words are float32.4, 3."),
        ({"file": {"path": "/etc/hosts"}}, "names a file outside of it, '/etc/hosts'"),
        ({"file": {"path": "a/../../b"}}, "names a file outside of it, 'a/../../b'"),
        ({"file": {"path": "a\0b"}}, "names a file 'a.x00b': .*embedded null"),
    ],
)
def test_what_a_manifest_cannot_say_is_named(tmp_path, change, message):
    path = saved(tmp_path)
    document = json.loads((path / "alpa.json").read_text())
    leaf = next(one for one in document["value"]["leaves"] if one["path"] == "['w']")
    leaf.update(change.pop("leaf", {}))
    document["value"]["files"][0].update(change.pop("file", {}))
    document["value"].update(change)
    assert seal(path, document)
    with pytest.raises(alpa.CheckpointError, match=message):
        alpa.restore(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a file without an end")
@pytest.mark.parametrize("name", ["alpa.json", "data", "checkpoint.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda at: os.symlink("/dev/zero", at)])
def test_a_file_without_an_end_is_not_read(tmp_path, name, make):
    """A pipe that nobody writes to would be waited for, a device would fill the memory."""
    path = saved(tmp_path)
    if name == "data":
        document = json.loads((path / "alpa.json").read_text())
        document["value"]["files"].append({"path": name, "size": 0, "sha256": "0" * 64})
        assert seal(path, document)
    elif name == "alpa.json":
        (path / name).unlink()
    make(path / name)
    with pytest.raises(alpa.CheckpointError, match=f"{name}: is damaged: it is no file"):
        alpa.restore(tmp_path)


def test_arrays_that_are_no_words_are_not_taken_for_keys(tmp_path):
    alpa.save(tmp_path, {"k": jnp.ones((4, 3)), "raw": jax.random.PRNGKey(3)}, step=1).wait()
    like = {"k": jax.random.split(jax.random.key(0), 4), "raw": jax.random.key(0)}
    with pytest.raises(
        alpa.CheckpointError, match="'k'. is float32.4, 3. in the checkpoint and ran"
    ):
        alpa.restore(tmp_path, like=like)
    alpa.save(tmp_path, {"raw": jax.random.PRNGKey(3)}, step=2).wait()
    found = alpa.restore(tmp_path, like={"raw": jax.random.key(0)})["raw"]
    assert np.array_equal(jax.random.key_data(found), jax.random.key_data(jax.random.key(3)))
