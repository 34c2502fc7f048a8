"""Weights of a trainer reach vLLM's engine, each part inside torchrun over 2 ranks.

`python vllm_weights.py trainer MODEL FOLDER` is the trainer, whose MoE blocks are MoELayers.
Version 7 has the weights of MODEL, 8 a NaN in an expert, 9 its layers under other names, and 10 no
dense weights, and half of what each expert had.

`python vllm_weights.py server MODEL FOLDER OUTPUT EPMOE` serves MODEL, which has other weights, and
takes these versions. EPMOE is the JSON of `--additional-config '{"epmoe": …}'`. OUTPUT.RANK gets
the tokens of the prompts of vllm_serve.py before, with version 7, after what is refused, and with
version 10; the messages of what was refused, on rank 0 also of a version that rank 1 does not live
to take; and how many experts have moved before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def train(model: str, folder: str) -> None:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import epmoe
    from epmoe.local.spread import local_view

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ep = epmoe.ExpertParallel(epmoe.EPConfig.from_hf(model, ep_size=ranks))
    # Put a MoELayer in place of each MoE block.
    for number, layer in enumerate(trained.model.layers):
        block = f"model.layers.{number}.mlp"
        layer.mlp = epmoe.MoELayer.from_safetensors(ep, epmoe.SafetensorsFolder(model), block)
    layers = [layer.mlp for layer in trained.model.layers]
    dense = {
        name: value for name, value in trained.state_dict().items() if ".mlp.experts." not in name
    }
    sender = epmoe.WeightSender(trained, folder, keep=4)
    is_first = ep.rank == 0
    sender.send(7, dense if is_first else None)
    w_down = local_view(layers[1].experts.w_down.data)
    was = w_down[0, 0, 0].item()
    w_down[0, 0, 0] = torch.nan
    sender.send(8, dense if is_first else None)
    w_down[0, 0, 0] = was
    trained.other = trained.model
    del trained.model
    epmoe.WeightSender(trained, folder, keep=4).send(9)
    trained.model = trained.other
    del trained.other
    for layer in layers:
        layer.experts.w_down.data.mul_(0.5)
    epmoe.WeightSender(trained, folder, keep=4).send(10)
    if ranks > 1:
        dist.barrier()


def serve(model: str, folder: str, output: str, epmoe: str) -> None:
    from vllm_live import PHASES, prompts
    from vllm_serve import engine_of, moved_experts, sampling, tokens_of

    rank = int(os.environ["RANK"])
    engine = engine_of(
        model,
        additional_config={"epmoe": json.loads(epmoe)},
        weight_transfer_config={"backend": "epmoe"},
    )

    def tokens() -> dict[int, list[int]]:
        return tokens_of(engine, slice(rank, None, 2))

    def take(version: int, **options: Any) -> str:
        """The message of what this raises, if anything."""
        engine.start_weight_update()
        try:
            engine.update_weights({"update_info": {"version": version, **options}})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        engine.finish_weight_update(str(version))
        return ""

    result: dict[str, Any] = {"said": [take(7)]}
    engine.init_weight_transfer_engine({"init_info": {"folder": folder}})
    # Prompts of few different tokens, so that experts move where they can.
    engine.generate(prompts(PHASES[0], rank), sampling(), use_tqdm=False)
    result["moved"] = moved_experts()
    result["before"] = tokens()
    problem = take(7)
    if "CPUs" in problem:
        result["said"].append(problem)
        result["refused"] = tokens()
        Path(f"{output}.{rank}").write_text(json.dumps(result))
        return
    assert not problem, problem
    assert engine.get_weight_version() == "7"
    result["version 7"] = tokens()
    result["said"] += [take(8), take(9), take(11, timeout_s=0.1)]
    result["refused"] = tokens()
    problem = take(10)
    assert not problem, problem
    result["version 10"] = tokens()
    # Rank 1 dies before it takes a version.
    if rank == 0:
        result["said"].append(take(10))
    Path(f"{output}.{rank}").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    {"trainer": train, "server": serve}[sys.argv[1]](*sys.argv[2:])
