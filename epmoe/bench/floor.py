"""The floor of the exchange: the simplest kernel that moves the rows of a round between ranks. A
round is one launch for each direction, and its time is the least that an exchange can take.

The kernel (floor.cu) gets the source address and the target address of each row. It stores the
rows, sets a flag on each other rank, and waits for the flags of all ranks. Rows arrive without gaps
between them, in the order of source ranks. The kernel is not part of the library: `FloorWindow`
compiles it on the machine that runs the benchmark.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.sample import Sample, wire_bytes
from epmoe.bench.sides import Side, poison
from epmoe.config.config import EPConfig
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.exchange.processors import processor_of
from epmoe.exchange.window_nvlink import NVLinkWindow
from epmoe.group.peers import Peers
from epmoe.native import build

# The numbers of thread blocks that the benchmark tries.
BLOCKS = (16, 32, 64, 128)
# Bytes of the flags at the start of a window: the first half for rows on their way to the experts,
# the second half for rows on their way back.
_FLAG_BYTES = 4096


class _Args(ctypes.Structure):
    """The struct `FloorArgs` of floor.cu: addresses and counts, each of 8 bytes."""

    _fields_ = [
        ("rows_n", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("vectors", ctypes.c_int64),
        ("flags_R", ctypes.c_int64),
        ("arrived_R", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("R", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
    ]


class FloorWindow:
    """The compiled kernel of the floor, and a window with room for all rows that a configuration
    allows. Making it is collective.
    """

    def __init__(
        self, config: EPConfig, rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = config.topology.ep_size
        self.group = group
        self.device = device
        peers = Peers.of(group)
        self.launch = _compiled(peers, device)
        # Make room for the rows of all other ranks, once for each direction.
        rows = (self.size - 1) * config.capacity.max_num_tokens_per_rank
        row_bytes = wire_bytes(config.model.hidden_size, config.model.torch_dtype, "auto")
        self.region_bytes = rows * row_bytes
        nbytes = _FLAG_BYTES + 2 * self.region_bytes
        addresses = Addresses(GpuMemory(device), processor_of(device))
        seats = Seats.full(peers.size)
        self.window = NVLinkWindow([nbytes] * peers.size, peers, seats, addresses, dead_at=0)
        # One `FloorState` of floor.cu for each direction: four int32.
        self.states = torch.zeros(2, 4, dtype=torch.int32, device=device)
        self.timeout_ns = int(config.exchange.timeout_s * 1e9)


class Floor(Side):
    """The side of the floor. Rows of `out_bytes` bytes go to other ranks, and rows of `back_bytes`
    bytes come back. Each launch has `blocks` thread blocks, which the caller may change.
    """

    def __init__(
        self,
        window: FloorWindow,
        sample: Sample,
        out_bytes: int,
        back_bytes: int,
        name: str = "floor",
    ):
        self.name = name
        self.window = window
        self.blocks = BLOCKS[-1]
        # Rows come back from where they went, so the traffic of the way back is transposed.
        self._directions = [
            _Direction(window, direction=0, traffic_RR=sample.remote_RR, row_bytes=out_bytes),
            _Direction(window, direction=1, traffic_RR=sample.remote_RR.T, row_bytes=back_bytes),
        ]
        self.check()

    def out(self) -> Any:
        self._directions[0].push(self.blocks)

    def back(self, handle: Any) -> Tensor:
        self._directions[1].push(self.blocks)
        return self._directions[1].arrived

    def arrived(self, handle: Any) -> list[Tensor]:
        return [self._directions[0].arrived]

    def check(self) -> None:
        """Run one round. Raise RuntimeError unless the rows that arrive are those that NCCL
        delivers.
        """
        poison(direction.arrived for direction in self._directions)
        torch.cuda.synchronize()
        dist.barrier(self.window.group, device_ids=[self.window.device.index])
        self.back(self.out())
        for direction in self._directions:
            wanted = torch.empty_like(direction.arrived)
            dist.all_to_all_single(
                wanted,
                direction.source,
                direction.splits_in,
                direction.splits_out,
                group=self.window.group,
            )
            if not torch.equal(direction.arrived, wanted):
                raise RuntimeError(
                    f"{self.name}: the arrived rows differ from those that NCCL delivers"
                )
        self.raise_if_missed()

    def raise_if_missed(self) -> None:
        """Raise RuntimeError if a flag has missed its deadline: the times are void then."""
        missed = self.window.states[:, 2].tolist()
        if any(missed):
            raise RuntimeError(
                f"{self.name}: rank {self.window.rank} timed out waiting for other ranks (bits "
                f"{missed})"
            )


class _Direction:
    """The rows that travel in one direction, and where they go: 0 is the way to the experts, 1 the
    way back.

    `traffic_RR` has the number of rows from each rank (first index) to each other rank.
    """

    def __init__(
        self, window: FloorWindow, direction: int, traffic_RR: Tensor, row_bytes: int
    ) -> None:
        rank = window.rank
        region = _FLAG_BYTES + direction * window.region_bytes
        flags = direction * _FLAG_BYTES // 2
        self.window = window
        self.splits_out = traffic_RR[rank].tolist()
        self.splits_in = traffic_RR[:, rank].tolist()
        generator = torch.Generator(window.device).manual_seed(rank)
        shape = (sum(self.splits_out), row_bytes)
        options = {"dtype": torch.uint8, "device": window.device, "generator": generator}
        self.source = torch.randint(1, 255, shape, **options)  # type: ignore[call-overload]
        # Where the rows of other ranks arrive here, one source after the other.
        rows_in = sum(self.splits_in)
        arrived = window.window.local[region : region + rows_in * row_bytes]
        self.arrived = arrived.view(rows_in, row_bytes)
        # This rank's rows arrive on another rank behind the rows of all lower ranks.
        first_R = (traffic_RR[:rank].sum(dim=0) * row_bytes + region).tolist()
        addresses = [region.data_ptr() for region in window.window.regions]
        targets = [address + first for address, first in zip(addresses, first_R, strict=True)]
        self._moves = moves(self.source, rank, self.splits_out, targets).to(window.device)
        self._flags = torch.tensor(
            [address + flags + 4 * rank for address in addresses], device=window.device
        )
        self._args = _Args(
            rows_n=self._moves.data_ptr(),
            n=len(self._moves),
            vectors=row_bytes // 16,
            flags_R=self._flags.data_ptr(),
            arrived_R=addresses[rank] + flags,
            state=window.states[direction].data_ptr(),
            rank=rank,
            R=window.size,
            timeout_ns=window.timeout_ns,
        )

    def push(self, blocks: int) -> None:
        """Launch the kernel. Raises RuntimeError if CUDA refuses."""
        problem = self.window.launch(
            ctypes.byref(self._args), blocks, torch.cuda.current_stream().cuda_stream
        )
        if problem:
            raise RuntimeError(f"floor: {problem.decode()}")


def moves(source: Tensor, rank: int, splits: list[int], targets: list[int]) -> Tensor:
    """List the source address and the target address of each of the n rows: int64 [n, 2].

    The rows of `source` are sorted by target rank: `splits[r]` rows go to rank r, from the address
    `targets[r]` on. In the list, rows to all ranks take turns, beginning with this rank. So all
    links are busy, and no rank is the target of all others at the same time.
    """
    # Find the target rank of each row, and its index among the rows to that rank.
    row_bytes = source.shape[1]
    R = len(splits)
    peer = torch.arange(R).repeat_interleave(torch.tensor(splits))
    slot = torch.cat([torch.arange(count) for count in splits])
    origin = source.data_ptr() + torch.arange(len(source)) * row_bytes
    target = torch.tensor(targets)[peer] + slot * row_bytes
    # Sort the rows, so that each rank in turn gets one.
    order = (slot * R + (peer - rank) % R).argsort()
    return torch.stack([origin, target], dim=1)[order].contiguous()


def _compiled(peers: Peers, device: torch.device) -> Any:
    """Compile the kernel on rank 0, which takes about a second, and load it on all ranks. Returns
    its launch function `epmoe_floor`. Collective. Raises BuildError on all ranks if it does not
    compile.
    """
    with tempfile.TemporaryDirectory(prefix="epmoe-floor-") as folder:
        library = str(Path(folder) / "libfloor.so")
        problem = ""
        if peers.rank == 0:
            major, minor = torch.cuda.get_device_capability(device)
            source = Path(__file__).with_suffix(".cu")
            options = [
                *build.CUDA_FLAGS,
                f"-arch=sm_{major}{minor}",
                f"-I{build.csrc()}",
                "-Xcompiler=-fPIC",
            ]
            command = ["nvcc", "-shared", *options, "-o", library, str(source)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if not Path(library).exists():
                    problem = done.stderr or "nvcc wrote no library"
            except OSError as error:
                problem = str(error)
        library, problem = peers.all_gather((library, problem))[0]
        if problem:
            raise build.BuildError(f"the benchmark's kernel did not compile:\n{problem}")
        launch = ctypes.CDLL(library).epmoe_floor
        # Rank 0 removes the folder once every rank has loaded the library.
        peers.all_gather(None)
    launch.argtypes = (ctypes.POINTER(_Args), ctypes.c_int, ctypes.c_void_p)
    launch.restype = ctypes.c_char_p
    return launch
