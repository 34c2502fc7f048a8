"""The device of each rank of an example, for all files here: a GPU if there is one, else the CPU.

device = meet()  # under torchrun: also makes the process group, and rank 0 prints the device
device = take_device(place, places)  # of a process that something else has started
"""

import faulthandler
import os

import torch
import torch.distributed as dist

# A crash of native code says in which lines of Python it was.
faulthandler.enable()


def take_device(place, places, needs_nccl=True):
    """The device of one of the processes of this machine, which have the places 0 to `places` − 1.
    A GPU becomes torch's current one.

    NCCL refuses two ranks on one GPU. So a process that needs NCCL takes a GPU where each process
    has one of its own; the others share GPUs by turns. Otherwise it is the CPU.
    """
    gpus = torch.cuda.device_count()
    needed = places if needs_nccl else 1
    if gpus < needed:
        return torch.device("cpu")
    device = torch.device("cuda", place % gpus)
    torch.cuda.set_device(device)
    return device


def describe(device):
    """What an example prints first."""
    if device.type == "cpu":
        return "device: cpu"
    return f"device: cuda, {torch.cuda.get_device_name(device)}"


def meet(needs_nccl=True):
    """Meet the ranks that torchrun has started, and return this one's device. Rank 0 prints it."""
    place = int(os.environ["LOCAL_RANK"])
    places = int(os.environ["LOCAL_WORLD_SIZE"])
    device = take_device(place, places, needs_nccl)
    # epmoe itself talks over gloo; NCCL is for torch's own collectives of tensors on GPUs.
    backends = "gloo"
    if device.type == "cuda" and needs_nccl:
        backends = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends)
    if dist.get_rank() == 0:
        print(describe(device), flush=True)
    return device
