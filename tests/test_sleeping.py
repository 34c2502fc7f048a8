"""Weights whose memory goes and comes back while an `ExpertParallel` sleeps."""

from __future__ import annotations

import pytest
import torch
from helpers import NO_CUDA, alone, full_layer
from torch import nn

import epmoe

NBYTES = 2 << 20  # more than torch and the driver round to


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_layer_is_right_after_its_weights_were_gone(device, level, inference):
    config = alone(hidden=128, dtype="bfloat16" if device.type == "cuda" else "float32", max_tokens=16)
    with epmoe.ExpertParallel(config, device=device) as ep, torch.inference_mode(inference), torch.no_grad():
        layer, _ = full_layer(ep, bias=True)
        kept = {name: value.cpu() for name, value in layer.state_dict().items()}
        state = [*layer.parameters(), layer.bias]
        weights = epmoe.SleepingWeights(layer)
        x = torch.randn(8, 128, device=device, dtype=config.model.torch_dtype)
        want, run, y = layer(x).clone(), None, torch.empty(0)
        if device.type == "cuda" and layer.experts.gemm != "loop":
            run = torch.cuda.CUDAGraph()
            with torch.cuda.graph(run):
                y = layer(x)
        at = [value.data_ptr() for value in state]
        for _ in range(2):
            ep.sleep(weights.offload if level == 1 else weights.discard)
            if device.type == "cpu":
                assert not any(value.any() for value in state), "the memory has gone"
            ep.wake(weights.restore)
            if level == 2:
                layer.load_state_dict(kept)
            assert torch.equal(layer(x), want)
            if run is not None:
                y.zero_()
                run.replay()
                assert torch.equal(y, want)
        assert [value.data_ptr() for value in [*layer.parameters(), layer.bias]] == at


@pytest.mark.gpu
@NO_CUDA
def test_their_memory_is_free_meanwhile():
    module = nn.Linear(NBYTES // 64, 16, bias=False, device="cuda", dtype=torch.float32)
    weights = epmoe.SleepingWeights(module)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    weights.offload()
    assert torch.cuda.mem_get_info()[0] - free == NBYTES
    weights.restore()
    assert torch.cuda.mem_get_info()[0] == free


def test_what_has_gone_or_is_here_already():
    module = nn.Linear(3, 2)
    want = module.weight.clone()
    weights = epmoe.SleepingWeights(module)
    weights.restore()
    for _ in range(2):
        weights.offload()
    weights.restore()
    assert torch.equal(module.weight, want)
    module.weight.sum().backward()  # they train on
    assert bool((module.weight.grad == 1).all())


@pytest.mark.parametrize("module", [nn.Identity(), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])])
def test_what_cannot_sleep(module):
    with pytest.raises(ValueError, match="must have tensors on one device"):
        epmoe.SleepingWeights(module)
