"""The recipes of docs/how-to.md for clusters, as far as one machine can carry them out."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import alpa_meta as alpa
from cost_model import cluster as named_cluster

pytest.importorskip("ray", reason="needs the extra alpa-meta[ray]")
pytestmark = pytest.mark.ray

HOW_TO = (Path(__file__).parents[1] / "docs" / "how-to.md").read_text()
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np

def step(weights, x):
    loss = lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2)
    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients)], {"loss": value}

def make():
    rows = (np.random.default_rng(k).normal(size=(8, 16)) for k in range(10**6))
    return step, [jnp.ones((16, 16)) / 9] * 2, (one.astype(np.float32) for one in rows)
"""
CLUSTER = """
name = "two hosts"
[[host_groups]]
num_hosts = 2
devices_per_host = 1
intra_host = {name = "memory", bandwidth = 5e9, latency = 25e-6}
inter_host = {name = "loopback", bandwidth = 5e9, latency = 1e-4}
[host_groups.device]
name = "cpu"
platform = "cpu"
memory = 8e9
memory_bandwidth = 2e10
peak_flops = {float32 = 5e10}
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames two-nodes" ] && printf 'first\\nsecond\\n'
"""
SRUN = """#!/bin/bash
# runs what srun would start on one node here; a task that is not on the head is the second node
while [[ "$1" == -* ]]; do [[ "$1" == -[wx] ]] && shift; shift; done
echo "$@" >> "$RECIPE_LOG"
exec "$@"
"""


def recipe(heading, language):
    """Return the code block behind a heading of the document."""
    text = HOW_TO.split(f"### {heading}\n", 1)[1]
    (block, *_) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return block


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def written(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def short_folder():
    """Make a folder with a short name: Ray puts sockets in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.fault(
    "SIGTERM of a run on Ray (the job's time is over)",
    "ends after the step under way, saved, with status 143",
)
def test_the_recipe_for_slurm_trains_on_two_nodes_and_is_ended_by_sigterm(tmp_path, short_folder):
    script = recipe("On Slurm", "sh")
    port, out = free_port(), tmp_path / "shared" / "run"
    for old, new in (
        ("6379", str(port)),
        ("h100:2x8", str(tmp_path / "two_hosts.toml")),
        ("/shared/run", str(out)),
        ('"$head:', '"127.0.0.1:'),  # both names are this machine's
    ):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "two_hosts.toml").write_text(CLUSTER)
    (tmp_path / "mymodule.py").write_text(PROGRAM)
    written(tmp_path / "srun", SRUN)
    written(tmp_path / "scontrol", SCONTROL)
    written(tmp_path / "job.sh", script)
    programs = [str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]]
    variables = {
        **os.environ,
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": str(tmp_path),
        "RAY_TMPDIR": str(short_folder),  # other clusters of this machine do not see this one
        "RECIPE_LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "two-nodes",
        "SLURM_JOB_NUM_NODES": "2",
    }
    variables.pop("RAY_ADDRESS", None)
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [str(tmp_path / "job.sh")],
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        metrics = out / "metrics.jsonl"
        latest = time.monotonic() + 400
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert job.poll() is None and time.monotonic() < latest, output_of(tmp_path)
            time.sleep(0.1)
        job.terminate()  # as Slurm does two minutes before the end
        assert job.wait(120) == 143, output_of(tmp_path)
    finally:
        os.killpg(job.pid, signal.SIGTERM)  # as Slurm does when the script has ended
        ended = time.monotonic() + 30
        while _is_there(job.pid) and time.monotonic() < ended:
            time.sleep(0.1)
        if _is_there(job.pid):
            os.killpg(job.pid, signal.SIGKILL)
    started = (tmp_path / "log").read_text().splitlines()
    commands = sorted(line.split(" --")[0] for line in started)
    assert commands == ["alpa train", "ray start", "ray start"]
    last = metrics.read_text().count("\n")
    assert f"stopped by SIGTERM after step {last}; go on with" in output_of(tmp_path)
    assert alpa.read_checkpoint(out / "checkpoint").step == last


def start_command(group, address):
    """Return the command that KubeRay runs in a pod of a group: `rayStartParams`, and the limits of
    the container where they do not say otherwise."""
    (container,) = group["template"]["spec"]["containers"]
    limits = container.get("resources", {}).get("limits", {})
    asked = {"nvidia.com/gpu": "num-gpus", "cpu": "num-cpus"}
    parameters = {asked[name]: str(count) for name, count in limits.items() if name in asked}
    parameters |= group["rayStartParams"]
    where = ["--head", f"--port={address.rpartition(':')[2]}"]
    if group.get("groupName"):
        where = [f"--address={address}"]
    return ["ray", "start", *where, *(f"--{k}={v}" for k, v in parameters.items()), "--block"]


def test_the_commands_of_the_recipe_for_kubernetes_train_on_two_hosts(tmp_path, short_folder):
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(recipe("On Kubernetes (KubeRay)", "yaml"))["spec"]
    head, (hosts,) = (spec["rayClusterSpec"][k] for k in ("headGroupSpec", "workerGroupSpecs"))
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "shared" / "run"
    entrypoint = spec["entrypoint"]
    for old, new in (("h100:2x8", str(tmp_path / "two_hosts.toml")), ("/shared/run", str(out))):
        assert old in entrypoint
        entrypoint = entrypoint.replace(old, new)
    (tmp_path / "two_hosts.toml").write_text(CLUSTER)
    (tmp_path / "mymodule.py").write_text(PROGRAM)
    variables = {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": str(tmp_path),
        "RAY_TMPDIR": str(short_folder),  # other clusters of this machine do not see this one
        "RAY_ADDRESS": address,  # as `ray job submit` has it for an entrypoint
        "RAY_AUTH_MODE": "token",  # this machine, unlike a pod, may have a token in ~/.ray
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    started = []

    def process(command, **more):
        with (tmp_path / "output").open("a") as output:
            made = subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, start_new_session=True, **more
            )
        started.append(made)
        return made

    try:
        process(start_command(head, address))
        health = ["ray", "health-check", f"--address={address}"]
        latest = time.monotonic() + 400
        while process(health).wait(300):  # what KubeRay's hosts wait for before they start
            assert time.monotonic() < latest, output_of(tmp_path)
        pods = [process(start_command(hosts, address)) for _ in range(hosts["replicas"])]
        job = process(entrypoint, shell=True)  # the shell of `ray job submit`
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert job.poll() is None and time.monotonic() < latest, output_of(tmp_path)
            for k, pod in enumerate(pods):
                if pod.poll() is not None:  # a pod that has ended is started again
                    pods[k] = process(start_command(hosts, address))
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGTERM)  # the shell and its program, as `ray job stop` does
        (patience,) = (
            int(one["value"])
            for one in head["template"]["spec"]["containers"][0]["env"]
            if one["name"] == "RAY_JOB_STOP_WAIT_TIME_S"  # then it kills them
        )
        assert ended(job, patience), output_of(tmp_path)
    finally:
        for one in started:
            if _is_there(one.pid):
                os.killpg(one.pid, signal.SIGTERM)
        for one in started:
            if not ended(one, 40):
                os.killpg(one.pid, signal.SIGKILL)
    last = metrics.read_text().count("\n")
    assert f"stopped by SIGTERM after step {last}; go on with" in output_of(tmp_path)
    assert alpa.read_checkpoint(out / "checkpoint").step == last


def ended(process, seconds):
    """Return whether a process and its group end within a time."""
    latest = time.monotonic() + seconds
    while process.poll() is None or _is_there(process.pid):
        if time.monotonic() > latest:
            return False
        time.sleep(0.1)
    return True


def output_of(folder):
    return (folder / "output").read_text()


def _is_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


FIELDS = {  # of ray.io/v1 and of pods, of those that the recipe might have: it has no others
    "job": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"},
    "cluster": {"headGroupSpec", "workerGroupSpecs", "rayVersion"},
    "head": {"rayStartParams", "template"},
    "hosts": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "pod": {"containers", "volumes"},
    "container": {"name", "image", "resources", "volumeMounts", "env"},
}


def test_the_recipe_for_kubernetes_has_the_fields_of_a_rayjob():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(recipe("On Kubernetes (KubeRay)", "yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    head, (hosts,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(job) <= FIELDS["job"] and set(job["spec"]) <= FIELDS["spec"]
    assert job["spec"]["shutdownAfterJobFinishes"] is True  # else its GPUs stay taken
    assert set(cluster) <= FIELDS["cluster"] and set(head) == FIELDS["head"]
    assert set(hosts) <= FIELDS["hosts"] and {"groupName", "template"} <= set(hosts)
    for parameters in (head["rayStartParams"], hosts["rayStartParams"]):
        assert all(isinstance(value, str) for value in parameters.values())
    (named,) = re.findall(r"--cluster (\S+)", job["spec"]["entrypoint"])
    (group,) = named_cluster(named).host_groups
    assert hosts["replicas"] == group.num_hosts
    for pod in (head["template"]["spec"], hosts["template"]["spec"]):
        (container,) = pod["containers"]
        assert set(pod) <= FIELDS["pod"] and set(container) <= FIELDS["container"]
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert {one["name"] for one in pod["volumes"]} == set(mounted)
        assert mounted["shared"] == "/shared" and "--out /shared/" in job["spec"]["entrypoint"]
    limits = hosts["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == group.devices_per_host
