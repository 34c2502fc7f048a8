"""A kernel that keeps a GPU busy."""

from __future__ import annotations

import gc
import time
from functools import cache
from typing import Any

import torch

HOLD = """
extern "C" __global__ void hold(int milliseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < milliseconds * 1000000ull);
}
"""


def collect_groups() -> None:
    """The memory of a group that is gone is given back once all work of the GPU has ended. Of a
    group that is collected beside such a kernel this process would wait for the kernel.
    """
    gc.collect()


class Holder:
    """holder(n, seconds) runs a kernel that has n multiprocessors to itself; returns the event of
    its end. With `shared`, n are blocks that take so many bytes of shared memory each.
    """

    def __init__(self, shared: int | None = None) -> None:
        collect_groups()
        properties = torch.cuda.get_device_properties()
        self.multiprocessors = properties.multi_processor_count
        # By default one block fills a multiprocessor.
        self._shared = shared or properties.shared_memory_per_block_optin
        self._kernel, self._stream = torch.cuda._compile_kernel(HOLD, "hold"), torch.cuda.Stream()
        self._kernel.set_shared_memory_config(self._shared)

    def __call__(self, multiprocessors: int, seconds: float) -> torch.cuda.Event:
        torch.cuda.synchronize()
        grid = (multiprocessors, 1, 1)
        threads = (32, 1, 1)
        milliseconds = round(seconds * 1000)
        self._kernel(grid, threads, [milliseconds], shared_mem=self._shared, stream=self._stream)
        ended = torch.cuda.Event()
        ended.record(self._stream)
        time.sleep(0.05)  # its blocks are resident now
        return ended


CROWD = """
extern "C" __global__ void __launch_bounds__(1024, 2)
    crowd(int milliseconds, const volatile int* stop) {
  __shared__ volatile int word;
  int held[HELD];
  #pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = word;
  if (threadIdx.x == 0) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
      __nanosleep(100000);
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*stop && now - begin < milliseconds * 1000000ull);
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < HELD; ++i) word = held[i];
}
"""


CROWD_SHARED = 100 << 10


@cache
def _crowd(registers: int) -> Any:
    source = CROWD.replace("HELD", str(max(registers - 16, 1)))  # the rest takes about 14
    kernel = torch.cuda._compile_kernel(source, "crowd")
    kernel.set_shared_memory_config(CROWD_SHARED)
    return kernel


class Crowd:
    """crowd(n, seconds) runs a kernel of n blocks, of which two fill a multiprocessor's threads,
    and returns the event of its end. With 32 registers a thread they fill its registers, too; one
    leaves half of it.
    """

    def __init__(self, registers: int) -> None:
        collect_groups()
        self._kernel, self._stream = _crowd(registers), torch.cuda.Stream()
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def __call__(
        self, blocks: int, seconds: float, stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.Event:
        stream = stream or self._stream
        args = [round(seconds * 1000), self._stop]
        self._kernel((blocks, 1, 1), (1024, 1, 1), args, shared_mem=CROWD_SHARED, stream=stream)
        ended = torch.cuda.Event()
        ended.record(stream)
        return ended

    def stop(self) -> None:
        """End it now, for good."""
        self._stop[0] = 1
