"""Prompts alone and together in vLLM's engine, with their experts: `python vllm_alone.py MODEL
OUTPUT EPMOE`.

EPMOE is the JSON of `--additional-config '{"epmoe": …}'`. Inside torchrun each of two ranks has
three prompts, and otherwise one process has all. OUTPUT.RANK gets, for each prompt, the tokens,
their log-probabilities and those of the prompt, and the experts of each token and layer by vLLM's
`--enable-return-routed-experts`: first of each prompt alone, then of all at once. `as_trained` says
of each call of the first layer of experts whether a layer of epmoe's own that trains, over the same
ranks and with the same routes, has the same bits.

vLLM has this option in its second model runner only, whose kernels are Triton's. They run in
Triton's interpreter here.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm_serve import NEW_TOKENS, PROMPTS, engine_of

import epmoe


def interpret() -> None:
    """Let vLLM for CPUs, which wants a backend of Triton for CPUs, run Triton's kernels in Triton's
    interpreter.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def record(model: Any, calls: list[list[Tensor]]) -> Any:
    """The first layer of experts, which from now on appends x, ids, weights and y of its calls."""
    layer = model.model.layers[0].mlp.experts.routed_experts
    forward = layer.forward_modular

    def recorded(*, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, **named: Any) -> Tensor:
        given = [tensor.clone() for tensor in (x, topk_ids, topk_weights)]
        y: Tensor = forward(x=x, topk_ids=topk_ids, topk_weights=topk_weights, **named)
        calls.append([*given, y.clone()])
        return y

    layer.forward_modular = recorded
    return layer


def as_trained(layer: Any, calls: list[list[Tensor]], ranks: int) -> list[bool]:
    # A layer that trains, with the weights of vLLM's.
    moe = layer.moe_config
    weights = [layer.w13_weight.data.clone(), layer.w2_weight.data.clone()]
    E = moe.num_experts
    K = moe.experts_per_token
    D = moe.hidden_dim
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": ranks},
        capacity={"max_num_tokens_per_rank": moe.max_num_tokens},
        experts={"batch_invariant": True},
    )
    with epmoe.ExpertParallel(config, device="cpu") as ep:
        experts = epmoe.GroupedExperts(*weights, batch_invariant=True)
        trains = epmoe.MoELayer(ep, torch.zeros(E, D), experts)
        # It computes each call again, with the routes of the call.
        x, ids, routing_weights, y = zip(
            *([tensor.clone() for tensor in call] for call in calls), strict=True
        )
        outputs = [
            trains(*each[:1], routing=each[1:])
            for each in zip(x, ids, routing_weights, strict=True)
        ]
        assert all(output.requires_grad for output in outputs)
        return [torch.equal(*each) for each in zip(outputs, y, strict=True)]


def written(number: int, output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    logprobs = [
        next(iter(each.values())).logprob for each in (*output.prompt_logprobs[1:], *one.logprobs)
    ]
    tokens = list(one.token_ids)
    routes = one.routed_experts.tolist()
    return {"prompt": number, "tokens": tokens, "logprobs": logprobs, "routes": routes}


def main(model: str, output: str, epmoe: str) -> None:
    interpret()
    from vllm import SamplingParams

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    engine = engine_of(
        model,
        ranks=ranks,
        enable_prefix_caching=True,  # without which vLLM hands no experts out
        enable_return_routed_experts=True,
        additional_config={"epmoe": json.loads(epmoe)},
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0,
    )

    calls = list[list[Tensor]]()
    layer = engine.apply_model(partial(record, calls=calls))[0]

    def generate(*numbers: int) -> list[Any]:
        prompts = [{"prompt_token_ids": PROMPTS[number]} for number in numbers]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [written(number, output) for number, output in zip(numbers, outputs, strict=True)]

    # Each rank has as many.
    mine = [number % len(PROMPTS) for number in range(len(PROMPTS) + 1)][rank::ranks]
    result = {"alone": [generate(number)[0] for number in mine], "together": generate(*mine)}
    if ranks > 1 and json.loads(epmoe)["layout"] == "layer":
        result["as_trained"] = as_trained(layer, calls, ranks)
    Path(f"{output}.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
