"""Words in windows of shared memory: operators that post and read them, and what other CPUs make of
their order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from launched import TIMEOUT_S

from epmoe.exchange.window import SharedMemoryWindow
from epmoe.native import ops

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PACKAGES = {CROSS: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}  # of Debian
MISSING = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
ON_ARM = pytest.param(
    CROSS,
    EMULATOR,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(bool(MISSING), reason=f"aarch64 needs Debian's {' and '.join(MISSING)}"),
    ],
)


def test_words_are_read_as_they_were_posted():
    window = torch.zeros(64, dtype=torch.uint8)
    for place, value in enumerate((1, -1, 2**63 - 1, -(2**63))):
        ops.post_word(window, 8 * place, value)
    words = window.view(torch.int64)
    assert ops.read_words(words[:4]).tolist() == words[:4].tolist() == [1, -1, 2**63 - 1, -(2**63)]
    assert not words[4:].any() and ops.read_words(words[:0]).tolist() == []
    for offset in (-8, 3, 57, 64):
        with pytest.raises(RuntimeError):
            ops.post_word(window, offset, 1)


def test_the_last_of_64_ranks_can_die_and_leave():
    """Its bit is the sign of a word."""
    window = SharedMemoryWindow.__new__(SharedMemoryWindow)
    window.regions = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    window.local = window.regions[1]
    window._dead_at = 8
    window._note(1 << 63 | 5)
    window.store(0, 1 << 63)
    assert [region.view(torch.int64).tolist() for region in window.regions] == [
        [-(2**63), 0],
        [-(2**63), 5 - 2**63],
    ]


@pytest.mark.parametrize(("compiler", "emulator"), [("c++", ""), ON_ARM])
def test_what_a_word_announces_is_there(tmp_path, compiler, emulator):
    """An emulator orders accesses at least as its host does, so the instructions are looked at,
    too.
    """
    # Compile two threads that write and read words.
    source = ROOT / "tests" / "words.cpp"
    command = [
        compiler,
        "-std=c++20",
        "-O2",
        "-pthread",
        "-static",
        f"-I{ROOT / 'csrc'}",
        str(source),
    ]
    subprocess.run([*command, "-o", str(tmp_path / "words")], check=True, timeout=TIMEOUT_S)
    # The program prints how often a word announced what was not there.
    run = [*filter(None, [emulator]), str(tmp_path / "words")]
    assert (
        subprocess.run(run, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
        == "0\n"
    )
    # The instructions that order accesses on ARM.
    if emulator:
        subprocess.run(
            [*command, "-S", "-o", str(tmp_path / "words.s")], check=True, timeout=TIMEOUT_S
        )
        text = Path(tmp_path / "words.s").read_text()
        assert re.search(r"\bstlr\b", text) and re.search(r"\bldap?r\b", text)
