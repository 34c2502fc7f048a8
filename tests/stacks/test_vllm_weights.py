"""Versions of a trainer's weights in vLLM's engine, by vLLM's own weight transfer: the tokens are
those of a new engine with these weights, also where experts have moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_vllm_engine import HERE, LAUNCH, TIMEOUT_S, run

SCRIPT = str(HERE / "vllm_weights.py")
CHOICES = {
    "layer": {"layout": "layer"},
    "live": {"layout": "layer", "live": {"slots_per_rank": 8, "every": 20}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two models, the tokens of the trained one, and versions of its weights."""
    folder = tmp_path_factory.mktemp("weights")
    run(str(HERE / "vllm_models.py"), str(folder), "qwen3", "qwen3_other")
    serve = str(HERE / "vllm_serve.py")
    run(serve, str(folder / "qwen3"), "one", "eager", str(folder / "tokens"), EPMOE_VLLM="")
    run(*LAUNCH, SCRIPT, "trainer", str(folder / "qwen3"), str(folder / "versions"))
    return folder


def serve(folder: Path, tmp_path: Path, choice: object) -> list[dict[str, Any]]:
    """What each rank writes."""
    server = [str(folder / "qwen3_other"), str(folder / "versions"), str(tmp_path / "tokens")]
    run(*LAUNCH, SCRIPT, "server", *server, json.dumps(choice))
    return [json.loads((tmp_path / f"tokens.{rank}").read_text()) for rank in range(2)]


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("choice", CHOICES)
def test_weights_of_a_trainer_reach_the_engine(folder: Path, tmp_path: Path, choice: str) -> None:
    ranks = serve(folder, tmp_path, CHOICES[choice])
    assert any(rank["moved"] for rank in ranks) == (choice == "live")
    trained = json.loads((folder / "tokens").read_text())
    assert ranks[0]["version 7"] | ranks[1]["version 7"] == trained
    for rank in ranks:
        assert rank["before"] != rank["version 7"] == rank["refused"] != rank["version 10"]
    # Both ranks refuse what does not fit, or is not there, and change nothing.
    assert all(all(rank["said"]) for rank in ranks)
    first = ranks[0]["said"]
    assert "`init_weight_transfer_engine` names the folder" in first[0]
    assert "version 8 has values that are not finite" in str([rank["said"][1] for rank in ranks])
    assert "has experts of 'other.layers.0.mlp', and vLLM has none there" in first[2]
    assert "version 11 of the weights did not come" in first[3]
    assert "EPTimeoutError: update_weights" in first[4] and "rank(s) [1] of the group" in first[4]


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_vllms_own_experts_for_cpus_are_refused(folder: Path, tmp_path: Path) -> None:
    """vLLM packs their weights for its kernel where it first loads them, and never again."""
    for rank in serve(folder, tmp_path, {"layout": "rank"}):
        assert "vLLM's own experts for CPUs pack weights once" in rank["said"][1]
        assert rank["refused"] == rank["before"]
