"""A kernel that keeps a GPU busy."""

from __future__ import annotations

import time

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


class Holder:
    """holder(n, seconds) runs a kernel that has n multiprocessors to itself; returns the event of its end."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties()
        self.multiprocessors = properties.multi_processor_count
        self._shared = properties.shared_memory_per_block_optin  # one block fills a multiprocessor
        self._kernel, self._stream = torch.cuda._compile_kernel(HOLD, "hold"), torch.cuda.Stream()
        self._kernel.set_shared_memory_config(self._shared)

    def __call__(self, multiprocessors: int, seconds: float) -> torch.cuda.Event:
        torch.cuda.synchronize()
        grid, threads, milliseconds = (multiprocessors, 1, 1), (32, 1, 1), round(seconds * 1000)
        self._kernel(grid, threads, [milliseconds], shared_mem=self._shared, stream=self._stream)
        ended = torch.cuda.Event()
        ended.record(self._stream)
        time.sleep(0.05)  # its blocks are resident now
        return ended
