"""Programs that a worker compiled are found by those that come after it."""

import os
import stat
import subprocess
import sys

from mesh_runtime.program_cache import forget_oldest

PROGRAM = """
import jax, jax.numpy as jnp
from mesh_runtime.program_cache import keep_programs
print(keep_programs())
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
chain = jax.jit(lambda x: jnp.sort(jnp.linalg.inv(x @ x.T + jnp.eye(64)), axis=0).sum())
print(chain(jnp.ones((64, 64))), "/jax/compilation_cache/cache_hits" in found)
"""


def lines_of(**variables):
    told = {name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    given = {name: value for name, value in os.environ.items() if name not in told}
    # Without the tests' flags, by which XLA compiles it in less time than is worth a file.
    given |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_second_process_compiles_nothing_anew(tmp_path):
    folder, first = lines_of(ALPA_CACHE_DIR=str(tmp_path))
    assert folder.startswith(str(tmp_path / "programs")) and first.endswith("False")
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert list(os.scandir(folder))
    again, second = lines_of(ALPA_CACHE_DIR=str(tmp_path))
    assert again == folder and second == first.replace("False", "True")


def test_a_folder_of_the_users_own_stays_and_none_is_made_where_it_is_switched_off(tmp_path):
    own = {"ALPA_CACHE_DIR": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own")}
    assert lines_of(**own)[0] == "None"
    off = {"ALPA_CACHE_DIR": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    assert lines_of(**off)[0] == "None"
    assert not (tmp_path / "programs").exists()


def test_what_was_used_longest_ago_is_forgotten_first(tmp_path):
    for age, name in enumerate(["new", "middle", "old"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    forget_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
