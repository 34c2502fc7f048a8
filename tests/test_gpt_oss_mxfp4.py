"""gpt-oss in MXFP4 over 4 ranks: the tokens of transformers' own dequantized model."""

from __future__ import annotations

import pytest
import torch
from launched import torchrun

pytest.importorskip("transformers")

from mxfp4_models import quantize
from transformers import AutoConfig, AutoModelForCausalLM

from epmoe.cli.demo import generate as demo

PROGRAM = """
import copy, logging, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, Mxfp4Config
import epmoe
from epmoe.local.weight_formats import dequantize_weights
from epmoe.native.arguments import MXFP4
from epmoe.local.spread import local_view

class Block(torch.nn.Module):  # as transformers' block returns it
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x), None

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("epmoe").addHandler(handler)
dist.init_process_group("gloo")
rank, size, path = dist.get_rank(), dist.get_world_size(), sys.argv[1]
prompt = torch.arange(5 + rank)[None] * 7 % 200
steps = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
folder = epmoe.SafetensorsFolder(path)
for dtype in (torch.float32, torch.bfloat16):
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True))
    spread = copy.deepcopy(whole)
    shape = {"dtype": str(dtype).removeprefix("torch.")}
    config = epmoe.EPConfig.from_hf(path, ep_size=size, model=shape, capacity={"max_num_tokens_per_rank": 32})
    with epmoe.ExpertParallel(config) as ep, torch.no_grad():
        for name, block in list(spread.named_modules()):
            if hasattr(block, "experts"):
                wanted = MXFP4 if dtype == torch.bfloat16 else dtype
                layer = epmoe.MoELayer.from_safetensors(ep, folder, name, dtype=wanted, router_dtype=dtype)
                experts = layer.experts
                assert experts.w_down.dtype == wanted and experts.w_down.requires_grad != experts.is_quantized
                rows = {"gate_up": local_view(experts.w_gate_up), "down": local_view(experts.w_down)}
                for i, x in enumerate(ep.placement.logical_experts(rank)):
                    for part, ours in ((name, of_rank[i]) for name, of_rank in rows.items()):
                        if experts.is_quantized:
                            ours = dequantize_weights(ours, getattr(experts, part + "_scales")[i], dtype)
                        assert torch.equal(ours, getattr(block.experts, part + "_proj")[x].T), (name, x, part)
                spread.set_submodule(name, Block(layer))
        want, got = (model.generate(prompt, **steps) for model in (whole, spread))
        assert torch.equal(want, got), (dtype, want, got)
assert not warnings, warnings
dist.destroy_process_group()
"""


@pytest.mark.slow  # tests/test_quantized_folders.py has the weights
def test_tokens_are_those_of_the_dequantized_model(tmp_path):
    torch.manual_seed(0)
    keys = demo.MODELS["gpt_oss"] | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **keys)).bfloat16().save_pretrained(tmp_path)
    quantize(tmp_path)
    done = torchrun(4, "-c", PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
