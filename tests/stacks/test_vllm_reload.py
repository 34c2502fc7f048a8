"""vLLM's sleep mode, and weights that it loads again: the tokens stay, and then are those of a new
engine, also where experts have moved.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_vllm_engine import HERE, TIMEOUT_S, run


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("live", [None, {"slots_per_rank": 8, "every": 20}], ids=["still", "live"])
def test_sleep_and_weights_that_are_loaded_again(
    tmp_path: Path, live: dict[str, int] | None
) -> None:
    run(str(HERE / "vllm_models.py"), str(tmp_path), "qwen3", "qwen3_other")
    model, other, output = (str(tmp_path / name) for name in ("qwen3", "qwen3_other", "tokens"))
    run(str(HERE / "vllm_serve.py"), other, "one", "eager", output, EPMOE_VLLM="")
    choice = json.dumps({"layout": "layer"} | ({} if live is None else {"live": live}))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*launcher, str(HERE / "vllm_reload.py"), model, other, output, choice)
    ranks = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]
    assert any(rank["moved"] for rank in ranks) == (live is not None)
    assert all(rank["before"] == rank["after"] for rank in ranks)
    assert ranks[0]["tokens"] | ranks[1]["tokens"] == json.loads(Path(output).read_text())
