"""The launchers start `epmoe run`. The tests run them without Slurm and Kubernetes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from launched import ROOT, run

LAUNCH = ROOT / "launch"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    model = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"}
    path.write_text(json.dumps({"model": model, "topology": {"ep_size": 2}}))
    return path


def start(tmp_path: Path, *command: object, **variables: str) -> None:
    """Runs `command`, which must pass its check.

    PATH has this Python's torchrun and an `srun` that runs its arguments here.
    """
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    outcome = run([str(part) for part in command], PATH=path, **variables)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("✓ error against") == 1


def test_torchrun(tmp_path: Path, config: Path) -> None:
    start(tmp_path, LAUNCH / "torchrun.sh", 2, config, "--steps", 1)


def test_slurm(tmp_path: Path, config: Path) -> None:
    start(tmp_path, "bash", LAUNCH / "slurm.sbatch", config, "--steps", 1, RANKS="2", SLURM_JOB_ID="17")


def test_kubernetes(tmp_path: Path, config: Path) -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    host = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == 1
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    (container,) = pod["containers"]
    arguments = [arg.replace(host, "localhost") for arg in container["args"]]
    assert arguments != container["args"], "the rendezvous is at the pod of index 0"
    arguments = [arg.replace("--nproc-per-node=4", "--nproc-per-node=2") for arg in arguments[:-1]]
    start(tmp_path, *container["command"], *arguments, config, "--steps", 1)
