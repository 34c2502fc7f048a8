"""vLLM's FusedMoEKernel and TritonExperts on two ranks through epmoe, in Triton's interpreter:
`python vllm_triton.py`.

The ranks are forks of this process, so that vLLM is imported once.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial

import vllm_native  # isort: skip - before vLLM

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vllm
from vllm.model_executor.layers.fused_moe import override_config, utils
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_kernels import Layer, Model, Weights, batch, check_close, moe_config, plain, step

from epmoe.integrations.vllm.choice import Choice
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.integrations.vllm.sizes import Shape, Sizes

MODEL = Model(E=6, K=2, D=256, F=128)
MAX_TOKENS = 20
RAGGED = (5, 0), (0, 3), (1, 1), (18, 20)
TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
LAYOUTS = ("layer", "rank")  # the first one finds vLLM's workspace empty
CPU = torch.device("cpu")
RANKS = 2
utils.per_token_group_quant_fp8 = vllm_native.per_token_group_quant_fp8


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    init_workspace_manager(CPU)
    for fp8 in (False, True):
        weights = Weights.random(MODEL, fp8, CPU)
        alone = Layer(moe_config(MODEL, 0, 1, MAX_TOKENS, CPU), weights)
        payload = "fp8" if fp8 else "auto"
        sizes = {}
        for layout in LAYOUTS:
            by, aligned = ("expert", True) if layout == "layer" else ("rank", False)
            shape = Shape(
                MODEL.E,
                MODEL.K,
                MODEL.D,
                torch.bfloat16,
                MAX_TOKENS,
                "linear",
                payload,
                by,
                aligned,
            )
            sizes[layout] = Sizes.make(shape, dist.group.WORLD, CPU, Choice())
        for layout, on_input in itertools.product(LAYOUTS, (False, True)):
            exchange = EpmoePrepareAndFinalize(sizes[layout], layout, aligned=layout == "layer")
            config = moe_config(MODEL, rank, RANKS, MAX_TOKENS, CPU)
            layer = Layer(config, weights.of_rank(rank, RANKS), exchange)
            for number, tokens in enumerate(RAGGED):
                x, ids, routing_weights = batch(MODEL, tokens[rank], 10 * number + rank, CPU)
                if on_input:  # as in Llama 4; powers of two are exact before and after fp8
                    ids, routing_weights = ids[:, :1], 0.25 * 2.0 ** (ids[:, :1] % 3)
                # vLLM would choose other tiles by the name of the GPU.
                with step(list(tokens)), override_config(TILES):
                    y = layer(x, ids, routing_weights, on_input)
                    reference = partial(plain, weights) if layout == "layer" else alone
                    expected = reference(x, ids, routing_weights, on_input) if len(x) else x
                what = f"{payload}, {layout}, on input={on_input}, tokens {tokens}, rank {rank}"
                # `plain` rounds nothing on the way: what lies between the two GEMMs is bf16, rows
                # may travel as fp8.
                check_close(y, expected, what, layer.slack)
                if rank == 0:
                    print(f"vLLM {vllm.__version__}: {what}: equal to one rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=RANKS, start_method="fork")
