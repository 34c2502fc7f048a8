"""The MegaMoE for Hopper of sgl-deep-gemm 0.2.5, which keeps rows in a ring, beside any torch.
Route is ours.

The library of the wheel wants torch 2.13. Its kernel is a header, and mega_moe_ring.cu launches it:
with the choices of the wheel for a buffer of as many tokens as the call has, and in our windows,
which have no NVLink multicast.

    # The headers are those of the wheel, unpacked.
    export MEGA_MOE_HEADERS=FOLDER/deep_gemm/include

    # Compile ahead for these T. This needs no GPU.
    python benchmarks/peers/mega_moe_ring.py CONFIG.yaml 1 16 64
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.bench.layer_sides import WholeLayer
from epmoe.bench.peers import LeftOut, Peer
from epmoe.config.config import EPConfig
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.exchange.memory import round_up
from epmoe.exchange.processors import processor_of
from epmoe.exchange.window_nvlink import NVLinkWindow
from epmoe.group.peers import Peers

VERSION = "0.2.5"
MULTIPROCESSORS = 132  # of H100 and H200 with SXM
_SOURCE = Path(__file__).with_suffix(".cu")
_FLAGS = (  # those of the wheel for its kernels, and what a library needs
    "-std=c++20",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--ptxas-options=--register-usage-level=10",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--diag-suppress=39,161,174,177,186,940",
    "-Xcompiler=-O3,-fPIC,-fconcepts",
    "-shared",
    "-cudart=static",
)
_SHARED_BYTES = 227 << 10  # that a block may have
_BLOCK = 128  # of rows, and of scales
_TILE_N = 256


class _Args(ctypes.Structure):
    """`Args` of mega_moe_ring.cu: addresses and counts, each of 8 bytes."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *(
                "x_TD",
                "ids_TK",
                "weights_TK",
                "y_TD",
                "gate_up",
                "down",
                "gate_up_scales",
                "down_scales",
            ),
            *("windows_R", "rank", "T"),
        )
    ]


class Kernel(NamedTuple):
    """The kernel for a shape and T, and its library."""

    R: int
    E: int
    K: int
    D: int
    F: int
    T: int

    @classmethod
    def of(cls, config: EPConfig, tokens: int) -> Kernel:
        """Raises LeftOut where the wheel has no kernel, or another one than those that are known
        here.
        """
        model = config.model
        F = config.model.intermediate_size or 0
        if model.hidden_size not in range(512, 8193, 512) or F not in range(256, 4097, 256):
            raise LeftOut(
                "it takes D that 512 divides, up to 8192, and F that 256 divides, up to 4096"
            )
        if tokens >= 8192:
            raise LeftOut(
                "from 8192 tokens on the wheel publishes rows in batches, which nobody has tried "
                "here"
            )
        R = config.topology.ep_size
        E = model.num_experts
        K = model.num_experts_per_tok
        return cls(R, E, K, model.hidden_size, F, tokens)

    @property
    def constants(self) -> dict[str, int]:
        """By the names of mega_moe_ring.cu."""
        e = self.E // self.R
        capacity = round_up(self.T, _BLOCK)
        tall = self.T * self.K / e >= 64
        pool = round_up(self.R * capacity * min(self.K, e) + e * (_BLOCK - 1), _BLOCK)
        lag = ring = 0
        # The second product follows the first at a distance, over a ring of rows.
        if capacity >= 1024:
            units = e * max(1, -(-capacity * self.K // (e * 1024)))
            lag = min(max(int(0.45 * units + 0.5), 8), 64)
            ring = min((8 * (lag + 4) + 4) * 128, pool)
        wave = e
        if not tall and not lag and self.T > 256:
            wave = min(max(1, MULTIPROCESSORS * _TILE_N // (2 * self.F)), e)
        early = self.D >= 512 * self.K
        stages, shared = self._stages(128 if tall else 64, pool, early)
        return {
            "RANKS": self.R,
            "EXPERTS": self.E,
            "TOP_K": self.K,
            "HIDDEN": self.D,
            "INTERMEDIATE": self.F,
            "MAX_TOKENS": capacity,
            "SMS": MULTIPROCESSORS,
            "WAVE": wave,
            "TILE_M": 128 if tall else 64,
            "RING_TOKENS": ring,
            "LAG": lag and 4000 + lag,
            "STAGES": stages,
            "SHARED_BYTES": shared,
            "COUNTS": int(4 <= self.T <= 128),
            "EARLY": int(self.T <= 256),
            "STORES": (4 if max(self.D, self.F) >= 4096 else 2) if tall else 0,
            "EARLY_COMBINE": int(early and min(self.D, self.F) // 128 > stages),
        }

    def _stages(self, m: int, pool: int, early: bool) -> tuple[int, int]:
        """How many tiles of both operands fit into shared memory, and the bytes of all of it."""
        tiles = -(-pool // m * (2 * self.F + self.D) // _TILE_N // MULTIPROCESSORS) + 2
        groups = _TILE_N // 128 if m == 128 else 1
        scales = max(2 * self.D, groups * self.F) // 128
        fixed = (
            round_up(2 * self.D, 1024)  # rows on their way
            + (32 << 10 if m == 64 else 16 << 10)  # a tile of the output, or its part
            + round_up(2 * scales * 4, 128)
            + 18 * 8  # barriers
            + (2 * 8 + 64 + 8 if early else 0)
            + max(tiles * 8, self.E * 4)
            + 8
        )
        stage = (m + _TILE_N) * 128 + m * 4 + 2 * 8
        stages = (_SHARED_BYTES - fixed) // stage
        return stages, fixed + stages * stage

    @property
    def library(self) -> Path:
        """Where it lies, beside the headers. Its name has a digest of all that it is made of."""
        digest = hashlib.sha256(
            f"{self.constants} {_FLAGS} {_SOURCE.read_text()}".encode()
        ).hexdigest()[:16]
        return _headers().parent / "built" / f"mega_moe_{digest}.so"

    def compile(self) -> str:
        """What went wrong, or "". It takes some seconds where the library is missing."""
        library = self.library
        if library.exists():
            return ""
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        defines = [f"-DLAYER_{name}={value}" for name, value in self.constants.items()]
        command = ["nvcc", *_FLAGS, f"-I{_headers()}", *defines, "-o", str(made), str(_SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"nvcc: {error}"
        if done.returncode:
            return done.stderr or "nvcc failed"
        made.replace(library)
        return ""

    def load(self, peers: Peers) -> Any:
        """Collective: rank 0 compiles."""
        problem = peers.all_gather(self.compile() if peers.rank == 0 else "")[0]
        if problem:
            raise RuntimeError(f"{_SOURCE.name} did not compile: {problem}")
        library = ctypes.CDLL(str(self.library))
        library.window_bytes.restype = ctypes.c_int64
        library.launch.argtypes = (ctypes.POINTER(_Args), ctypes.c_void_p)
        library.launch.restype = ctypes.c_char_p
        return library


def _headers() -> Path:
    """Raises ImportError without those of 0.2.5."""
    folder = Path(os.environ.get("MEGA_MOE_HEADERS", ""))
    version = folder.parent / "VERSION"
    if not version.is_file() or version.read_text().strip() != VERSION:
        raise ImportError("MEGA_MOE_HEADERS names no folder of them")
    return folder


def _by_turns(gate_up_eND: Tensor) -> Tensor:
    """8 rows of gate and 8 of up by turns, as the kernel reads them."""
    e, N, D = gate_up_eND.shape
    return gate_up_eND.view(e, 2, N // 16, 8, D).transpose(1, 2).reshape(e, N, D)


class MegaMoERing(Peer):
    name = "DeepGEMM MegaMoE, ring"
    install = f"the headers of sgl-deep-gemm {VERSION}"

    def version(self) -> str:
        _headers()
        return VERSION

    @contextmanager
    def layer(self, case: WholeLayer) -> Iterator[Callable[[], Tensor]]:
        experts = case.experts
        tokens = len(case.x_TD)
        if not experts.is_fp8 or torch.cuda.get_device_capability() != (9, 0):
            raise LeftOut("it takes fp8 weights on compute capability 9.0")
        if torch.cuda.get_device_properties().multi_processor_count != MULTIPROCESSORS:
            raise LeftOut(f"it is compiled for {MULTIPROCESSORS} multiprocessors")
        peers = Peers.of(case.group)
        device = case.x_TD.device
        library = Kernel.of(case.ep.config, tokens).load(peers)
        nbytes = round_up(library.window_bytes(), 512)
        addresses = Addresses(GpuMemory(device), processor_of(device))
        window = NVLinkWindow(
            [nbytes + 512] * peers.size,
            peers,
            Seats.full(peers.size),
            addresses,
            dead_at=nbytes,
        )
        windows_R = (ctypes.c_int64 * peers.size)(*(region.data_ptr() for region in window.regions))
        y_TD = torch.empty_like(case.x_TD)
        gate_up = _by_turns(experts.w_gate_up.data.view(torch.uint8))
        scales = experts.gate_up_scales, experts.down_scales
        assert scales[0] is not None and scales[1] is not None
        args = _Args(
            x_TD=case.x_TD.data_ptr(),
            y_TD=y_TD.data_ptr(),
            gate_up=gate_up.data_ptr(),
            down=experts.w_down.data_ptr(),
            gate_up_scales=scales[0].data_ptr(),
            down_scales=scales[1].data_ptr(),
            windows_R=ctypes.addressof(windows_R),
            rank=peers.rank,
            T=tokens,
        )

        def run() -> Tensor:
            routing = case.routed()
            args.ids_TK = routing.ids.data_ptr()
            args.weights_TK = routing.weights.data_ptr()
            problem = library.launch(ctypes.byref(args), torch.cuda.current_stream().cuda_stream)
            if problem:
                raise RuntimeError(problem.decode())
            return y_TD

        try:
            yield run
            # No rank unmaps its window while another one may write into it.
            torch.cuda.synchronize()
            case.group.barrier()
        finally:
            # Its thread would look at CUDA once the other ranks end.
            window.deaths.close()


PEERS = [MegaMoERing()]


if __name__ == "__main__":
    config = EPConfig.load(sys.argv[1])
    for tokens in map(int, sys.argv[2:]):
        kernel = Kernel.of(config, tokens)
        print(tokens, kernel.library, kernel.compile() or "is there", flush=True)
