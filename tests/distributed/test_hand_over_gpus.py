"""Weights that go from a trainer's GPUs to a server's through memory that processes share, while
graphs replay.

On the CPU, anonymous shared memory stands for that of GPUs, and calls for replays.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from helpers import captured, randn, slow
from test_hand_over import D, E, K, M, Model, send, side, wait_for
from torch import Tensor

from epmoe import WeightReceiver, WeightSender
from epmoe.exchange import sockets
from epmoe.exchange.cpu import Cpu
from epmoe.exchange.gpu import GpuCopies
from epmoe.exchange.places import HostMemory
from epmoe.live import versions

CAPTURES = "spare, graphs are captured"  # again and again, also while versions arrive
KINDS = {  # dtypes are bf16: fp8, options of the receiver and of the sender
    "spare": (False, {}, {}),
    CAPTURES: (False, {}, {}),
    "no spare": (False, {"spare": False}, {}),
    "fp8": (True, {}, {}),
    "fp8, no spare": (True, {"spare": False}, {}),
    "by the host": (False, {}, {"on_host": True}),
}


def share_host_memory(set_attribute: Callable = setattr) -> None:
    """Let this process's versions go by memory that is shared as GPUs share theirs."""
    memory = HostMemory()
    copies = object.__new__(GpuCopies)
    copies.memory = memory
    copies.running = nullcontext
    copies.begin_thread = lambda: None
    set_attribute(Cpu, "shared_memory", lambda self: memory)
    set_attribute(Cpu, "weight_copies", lambda self: copies)


@pytest.fixture(autouse=True)
def _shared(device, monkeypatch) -> None:
    if device.type == "cpu":
        share_host_memory(monkeypatch.setattr)


def step_of(model: Model, x: Tensor) -> tuple[Callable[[], None], Tensor]:
    """A step that writes the same y each time."""
    if x.is_cuda and all(layer.experts.is_capturable for layer in model.layers):
        return captured(partial(model, x))
    y = model(x).clone()
    return lambda: y.copy_(model(x)), y


def wrong_outputs(
    model: Model, receiver: WeightReceiver, folder: Path, last: int, fp8: bool, captures: bool
) -> int:
    """Serve until the last version. The host waits for no step."""
    ep = model.layers[0].ep
    x = randn(M, D, seed=9).to(ep.config.model.torch_dtype).to(ep.device)
    # What each version gives.
    wanted = torch.stack([Model(ep, version, fp8)(x) for version in range(last + 1)])
    assert len({int(one.view(torch.int16).sum()) for one in wanted}) > last, "versions differ"
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    # Steps until the last version, each compared on the device.
    step, y = step_of(model, x)
    random = Random(ep.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
    steps = 0
    (folder / f"seen{receiver.version}").touch()
    while receiver.version < last or steps < 100:
        if receiver.tick():
            (folder / f"seen{receiver.version}").touch()
        time.sleep(random.choice((0, 0, 0.002)))
        if captures and steps % 5 == 4:
            step, y = step_of(model, x)
        step()
        wrong += (y != wanted[max(receiver.version, 0)]).sum()
        steps += 1
    # The weights have kept their addresses.
    ep.check()
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses, (
        "graphs have them"
    )
    return int(wrong)


@pytest.mark.parametrize("kind", [slow(k) if k == "fp8, no spare" else k for k in KINDS])
def test_a_replay_meets_one_version(rank, size, device, folder, kind):
    if size < 2:
        pytest.skip("a trainer and a server have a rank each")
    fp8, receives, sends = KINDS[kind]
    last = 6
    with (
        side(rank, size, size // 2, "bfloat16", {}, device) as (ep, trains),
        torch.inference_mode(not trains),
    ):
        model = Model(ep, 0, fp8 and not trains)
        if trains:
            # The trainer sends versions, some of which the next one overtakes.
            sender = WeightSender(model, folder, keep=2, **sends)
            dist.barrier()
            for version in range(1, last + 1):
                send(model, sender, version)
                if version % 3 or version == last:  # else the next one overtakes it
                    wait_for(folder, version)
        else:
            dist.barrier()
            # The server replays meanwhile.
            receiver = WeightReceiver(ep, model, folder, dense=model.take_routers, **receives)
            wrong = wrong_outputs(model, receiver, folder, last, fp8, kind == CAPTURES)
            receiver.load(last)
            receiver.close()
            assert receiver.problem is None and wrong == 0
        dist.barrier()


@torch.inference_mode()
def test_a_version_that_went_with_its_trainer(rank, make_ep, folder):
    """The folder still names it. A server begins with its own weights, of which it knows the
    version, and takes the next trainer's versions.
    """
    model = Model(make_ep(experts=E, top_k=K, hidden=D, max_tokens=M), 0)
    senders = [WeightSender(model, folder)]
    began = []
    senders[0].send(3)
    # A server begins while the trainer is there, and one after it has gone.
    for _ in range(2):
        dist.barrier()
        receiver = WeightReceiver(model.layers[0].ep, model, folder)
        began.append(receiver.version)
        receiver.close()
        dist.barrier()
        senders.clear()
    # Another trainer comes.
    senders.append(WeightSender(model, folder))
    receiver = WeightReceiver(model.layers[0].ep, model, folder)
    senders[0].send(4)
    receiver.load(4)
    receiver.close()
    assert began == [3, 3] and receiver.version == 4
    dist.barrier()


def test_a_rank_on_a_cpu_takes_no_memory_of_gpus():
    part = {"experts": {}, "dense": {}, "socket": "\0epmoe-nobody"}
    with pytest.raises(
        ValueError, match=r"version 3 lies in GPU memory: WeightSender\(…, on_host=True\)"
    ):
        versions._map_offer(part, 3, None)
    with pytest.raises(FileNotFoundError, match="version 3 is not there any more"):
        versions._map_offer(part, 3, HostMemory())


def test_a_version_at_a_socket_where_nobody_answers_is_gone(monkeypatch):
    """Such as one of a trainer that is stopped, or that has died beside a process of its own."""
    monkeypatch.setattr(sockets, "SOCKET_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0epmoe-{secrets.token_hex(16)}")
        listener.listen()
        part = {"experts": {}, "dense": {}, "socket": listener.getsockname().decode()}
        with pytest.raises(FileNotFoundError, match="version 3 is not there any more.*not answer"):
            versions._map_offer(part, 3, HostMemory())
