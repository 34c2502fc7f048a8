"""The launchers of launch/: the commands that they come to, and that these run, here without Slurm
and Kubernetes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import ROOT, TIMEOUT_S, run

LAUNCH = ROOT / "launch"
SCRIPTS = {  # in place of Slurm's
    "srun": 'i=0; while [ $i -lt "$SLURM_JOB_NUM_NODES" ]; do "$@" & i=$((i + 1)); done; wait',
    "scontrol": 'echo "$SLURM_JOB_NODELIST" | tr , "\\n"',
}
SLURM = ["bash", str(LAUNCH / "slurm.sbatch")]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with this Python's torchrun, and with Slurm's commands: nodes are processes of this
    machine.
    """
    return os.pathsep.join(
        [scripts(tmp_path / "bin", SCRIPTS), str(Path(sys.executable).parent), os.environ["PATH"]]
    )


@pytest.fixture
def shown(tmp_path: Path) -> str:
    """A PATH whose torchrun prints its arguments."""
    return os.pathsep.join(
        [scripts(tmp_path / "bin", SCRIPTS | {"torchrun": 'echo "$@"'}), os.environ["PATH"]]
    )


def scripts(folder: Path, content: dict[str, str]) -> str:
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def config(tmp_path: Path, ranks_per_node: int) -> str:
    path = tmp_path / "tiny.json"
    model = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"}
    path.write_text(
        json.dumps({"model": model, "topology": {"ep_size": 2, "ranks_per_node": ranks_per_node}})
    )
    return str(path)


def free_port() -> str:
    with socket.create_server(("localhost", 0)) as server:
        return str(server.getsockname()[1])


def words(command: list[str], **variables: str) -> list[str]:
    """What the launcher gives torchrun, on each node the same."""
    outcome = run(command, **variables)
    assert outcome.returncode == 0, outcome.stderr
    (line,) = set(outcome.stdout.splitlines())
    return line.split()


def test_torchrun_on_one_machine(shown):
    given = words([str(LAUNCH / "torchrun.sh"), "8", "cpu_demo", "--steps", "3"], PATH=shown)
    assert given == [
        "--standalone",
        "--nproc-per-node",
        "8",
        "-m",
        "epmoe",
        "run",
        "cpu_demo",
        "--steps",
        "3",
    ]


def test_torchrun_on_several_machines(shown):
    command = [str(LAUNCH / "torchrun.sh"), "8", "cpu_demo"]
    rendezvous = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id epmoe"
    given = words(command, PATH=shown, NODES="2", HEAD="host0:29500")
    assert given == f"{rendezvous} --nproc-per-node 8 -m epmoe run cpu_demo".split()
    outcome = run(command, PATH=shown, NODES="2")
    assert outcome.returncode != 0 and "HEAD=HOST:PORT, one of the 2 machines" in outcome.stderr


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [({"RANKS": "8"}, 8), ({"SLURM_GPUS_ON_NODE": "2"}, 2), ({}, 4)],
    ids=["RANKS", "GPUs", "neither"],
)
def test_slurm_on_several_nodes(shown, variables, ranks):
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n4,n5,n7"}
    given = words([*SLURM, "cpu_demo", "--steps", "3"], PATH=shown, **job, **variables)
    nodes = f"--nnodes 3 --nproc-per-node {ranks}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint n4:29500 --rdzv-id 17"
    assert given == f"{nodes} {rendezvous} -m epmoe run cpu_demo --steps 3".split()


def job() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The service, the job, and the container of its pods, as kubernetes.yaml has them."""
    service, found = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return service, found, container


def test_kubernetes_agrees_with_itself():
    """Pods, nodes and ranks are of one size, and the rendezvous is at the pod with index 0."""
    # Of the manifest: the job, its pods, and the options and the environment of torchrun.
    service, found, container = job()
    spec = found["spec"]
    pod = found["spec"]["template"]["spec"]
    options = dict(
        arg.removeprefix("--").split("=", 1) for arg in container["args"] if arg.startswith("--")
    )
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    # A pod for each node, with as many processes as the configuration has ranks of a node.
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"]) > 1
    assert environment["EPMOE_TOPOLOGY__RANKS_PER_NODE"] == options["nproc-per-node"]
    assert int(environment["EPMOE_TOPOLOGY__EP_SIZE"]) == int(options["nnodes"]) * int(
        options["nproc-per-node"]
    )
    # Pods find the first one by its name in the service.
    assert options["rdzv-endpoint"] == f"{found['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert (
        service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    )
    assert service["spec"]["publishNotReadyAddresses"], "pods find each other before they are ready"
    # No two pods of the job are on one node.
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = {"job-name": found["metadata"]["name"]}
    assert service["spec"]["selector"] == apart["labelSelector"]["matchLabels"] == labels


@pytest.mark.slow
def test_torchrun_runs(tmp_path, path):
    outcome = run(
        [str(LAUNCH / "torchrun.sh"), "2", config(tmp_path, 2), "--steps", "1"], PATH=path
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("✓ error against") == 1


@pytest.mark.slow
def test_slurm_runs_two_nodes(tmp_path, path):
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost,localhost",
    }
    command = [*SLURM, config(tmp_path, 1), "--steps", "1"]
    outcome = run(command, PATH=path, RANKS="1", PORT=free_port(), **job)
    assert outcome.stdout.count("✓ error against") == 1, outcome.stdout + outcome.stderr


@pytest.mark.slow
def test_kubernetes_runs_two_pods(tmp_path, path):
    _, _, container = job()
    # The command of the pod, with one rank a pod, an endpoint here and a small config.
    changed = {
        "--nproc-per-node=4": "--nproc-per-node=1",
        "--rdzv-endpoint=epmoe-0.epmoe:29500": f"--rdzv-endpoint=localhost:{free_port()}",
        "/configs/cpu_demo.yaml": config(tmp_path, 1),
    }
    command = [
        *container["command"],
        *(changed.pop(arg, arg) for arg in container["args"]),
        "--steps",
        "1",
    ]
    assert not changed
    sizes = {
        "EPMOE_TOPOLOGY__EP_SIZE": "2",
        "EPMOE_TOPOLOGY__RANKS_PER_NODE": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment = (
        os.environ
        | {entry["name"]: entry["value"] for entry in container["env"]}
        | sizes
        | {"PATH": path}
    )

    # Two of them, one of which prints the result.
    pods = [
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        printed = [pod.communicate(timeout=TIMEOUT_S) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert sum(out.count("✓ error against") for out, _ in printed) == 1
