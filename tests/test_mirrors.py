"""What Python and C++ declare twice: the same names in the same order, since both sides exchange bare integers.

The C++ side is read as text, so these tests need neither a compiler nor a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers import ROOT, alone

from epmoe.exchange.descriptors import DESCRIPTOR
from epmoe.exchange.health import COUNTERS, STATUS
from epmoe.exchange.memory import (
    LL_MAX_TOKENS,
    NUM_COUNTERS,
    OFFSETS,
    RAIL_TAG_BYTES,
    SIGNAL_BYTES,
    SIZES,
    MemoryPlan,
    RailSlot,
)
from epmoe.exchange.mismatch import HEADER_D, HEADER_MODE
from epmoe.exchange.round_state import DONE_AT, LATCHED_AT, PROGRESS, PROGRESS_AT, RECEIVING_AT
from epmoe.native.formats import SCALE_BLOCK, WIRE_FORMATS
from epmoe.native.ops import DTYPES

CSRC = ROOT / "csrc"
Names = tuple[tuple[str, str], ...]
"""(type, name) of each field or enumerator, in order"""


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def body_of(text: str, kind: str, name: str) -> str:
    """What stands between the braces of the one `struct` or `enum` of this name."""
    (body,) = re.findall(rf"\b{kind}\s+(?:alignas\(\d+\)\s+)?{name}\b[^{{;]*{{([^{{}}]*)}};", without_comments(text))
    return body


def struct_fields(text: str, name: str) -> Names:
    """The fields of a struct of plain members; `int64_t a, b[2];` counts as a, b, b."""
    fields = []
    for declaration in filter(None, map(str.strip, body_of(text, "struct", name).split(";"))):
        kind, declared = declaration.split(maxsplit=1)
        for field in declared.split(","):
            match = re.fullmatch(r"\s*(\w+)(?:\[(\d+)\])?\s*", field)
            assert match, f"{name}: cannot read {declaration!r}"
            fields += [(kind, match[1])] * int(match[2] or 1)
    return tuple(fields)


def enumerators(text: str, name: str) -> Names:
    """The enumerators of an enum that counts from 0."""
    values = filter(None, map(str.strip, body_of(text, "enum(?: class)?", name).split(",")))
    return tuple(("enumerator", value) for value in values)


def int64s(*names: str) -> Names:
    kinds = {"payload_format": "WireFormat", "combine_format": "WireFormat"}  # of 8 bytes, too
    return tuple((kinds.get(name, "int64_t"), name.replace(".", "_")) for name in names)


def camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


@dataclass
class Mirror:
    path: str
    read: Callable[[str, str], Names]
    want: Names

    def text(self) -> str:
        return (CSRC / self.path).read_text()


MIRRORS = {
    "ExchangePlan": Mirror("plan.h", struct_fields, int64s(*SIZES, *OFFSETS)),
    "ExchangeDescriptor": Mirror(
        "ops_exchange.cpp",
        struct_fields,
        (("ExchangePlan", "plan"), *int64s(*DESCRIPTOR[len(SIZES) + len(OFFSETS) :])),
    ),
    "RailSlot": Mirror("rail.h", struct_fields, int64s(*RailSlot._fields)),
    "Progress": Mirror("plan.h", struct_fields, int64s(*PROGRESS)),
    "Status": Mirror("plan.h", struct_fields, int64s(*STATUS)),
    "Counter": Mirror(
        "types.h", enumerators, tuple(("enumerator", camel(name)) for name in (*COUNTERS, "num_counters"))
    ),
}


@pytest.mark.parametrize(("name", "mirror"), MIRRORS.items(), ids=MIRRORS)
def test_both_sides_declare_the_same(name, mirror):
    assert mirror.read(mirror.text(), name) == mirror.want


def constant(pattern: str, *suffixes: str) -> int:
    """The number that the one match of `pattern` in the sources captures."""
    texts = (without_comments(path.read_text()) for path in CSRC.rglob("*.*") if path.suffix in suffixes)
    (number,) = (int(number) for text in texts for number in re.findall(pattern, text))
    return number


def plan(transport: str) -> MemoryPlan:
    return MemoryPlan.build(
        alone(max_tokens=2 * LL_MAX_TOKENS, topology={"ep_size": 2}, exchange={"transport": transport})
    )


@pytest.mark.parametrize("transport", ["shared_memory", "nvlink"])
def test_every_buffer_has_an_offset(transport):
    assert sorted(buffer.name for buffer in plan(transport).buffers) == sorted(OFFSETS)
    assert tuple(plan(transport).sizes) == SIZES


def test_sizes_that_both_sides_know():
    assert NUM_COUNTERS == len(COUNTERS) == plan("nvlink")["health.counters"].shape[0]
    assert plan("nvlink")["state"].nbytes == constant(r"sizeof\(RoundState\) == (\d+)", ".h")
    places = {
        "latched": LATCHED_AT,
        "phases": 12,
        "done": DONE_AT,
        "progress": PROGRESS_AT,
        "receiving": RECEIVING_AT,
    }
    for field, place in places.items():
        assert constant(rf"offsetof\(RoundState, {field}\) == (\d+)", ".h") == place
    assert constant(r"\bkScaleBlock = (\d+)", ".h", ".cuh") == SCALE_BLOCK
    assert 4 * len(struct_fields(without_comments((CSRC / "rail.h").read_text()), "RailTag")) == RAIL_TAG_BYTES
    assert constant(r"struct alignas\((\d+)\) RoundHeader", ".h") == SIGNAL_BYTES


def test_headers_are_read_where_they_are_written():
    names = [name for _, name in struct_fields((CSRC / "plan.h").read_text(), "RoundHeader")]
    assert names[HEADER_D : HEADER_D + 3] == ["D", "K", "dtype"] and names[HEADER_MODE] == "mode"


def test_the_tables_of_wire_formats_are_equal():
    text = without_comments((CSRC / "wire_format.h").read_text())
    assert enumerators(text, "WireFormat") == tuple(("enumerator", camel(name)) for name in WIRE_FORMATS)
    assert [each.number for each in WIRE_FORMATS.values()] == list(range(len(WIRE_FORMATS)))
    elements = ["kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3"]
    rows = dict(re.findall(r"case WireFormat::(\w+):\s*return {DType::([\w, ]+)};", text))
    for name, wire in WIRE_FORMATS.items():
        if wire.element is None:
            assert camel(name) not in rows and wire.dtype_of(DTYPES[1]) == DTYPES[1]
            continue
        element, *numbers, packed = rows.pop(camel(name)).replace("kScaleBlock", str(SCALE_BLOCK)).split(", ")
        assert DTYPES[elements.index(element)] == wire.element and packed == str(wire.packed).lower()
        assert [int(number) for number in numbers] == [wire.element_bits, wire.scale.itemsize, wire.block]
    assert not rows


def test_the_number_of_ll_tokens_fits_its_bits():
    """Dispatch sends it beside the number of rows, in one word: csrc/cuda/dispatch/block.cuh."""
    limit = 2 ** constant(r"\bkLLTokenBits = (\d+)", ".h", ".cuh") - 1
    assert plan("nvlink").sizes["ll_max_tokens"] == LL_MAX_TOKENS <= limit
