"""The structs and constants of C++ that Python reads or writes.

The native library itself reports their layouts, so Python cannot disagree with C++. The list of
what it reports is csrc/ops_layouts.cpp. A struct becomes a class of ctypes. An expression such as
`struct("Status").from_address(address).code` reads a word of memory as fast as an array does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

from epmoe.native import ops


@cache
def numbers(name: str) -> dict[str, int]:
    """The values of an enumeration of csrc by name. The name "constants" stands for the constants
    that `constant` finds. Raises KeyError if the library does not report the enumeration.
    """
    values = {}
    for part in _reported()[name][1:]:
        key, _, value = part.partition(":")
        values[key] = int(value)
    return values


@cache
def constant(name: str) -> int:
    """The value of a constant of csrc. Raises KeyError if the library does not report it."""
    return numbers("constants")[name]


def bits(name: str, word: int) -> dict[str, int]:
    """Take a word of bit fields apart. Returns the value of each field by name.

    `name` is that of the struct with the bit fields.
    """
    values = {}
    for part in _reported()[name][1:]:
        field, count, first_bit = part.split(":")
        mask = (1 << int(count)) - 1
        values[field] = (word >> int(first_bit)) & mask
    return values


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """Make the ctypes class of a struct of csrc. Raises KeyError if the library does not report it.

    Padding between fields gets fields whose names begin with "_".
    """
    nbytes, *described = _reported()[name]
    fields: list[tuple[str, type]] = []
    end = 0
    for field in described:
        field_name, element, count, offset = field.split(":")
        # The type of an element, such as "int64". ctypes has no type of some sizes: then the field
        # is a struct within this struct, which is read as bytes.
        bits = int(element.removeprefix("u").removeprefix("int"))
        kind = getattr(ctypes, f"c_{element}", ctypes.c_char * (bits // 8))
        if count != "1":
            kind = kind * int(count)
        _skip(fields, end, int(offset))
        fields.append((field_name, kind))
        end = int(offset) + ctypes.sizeof(kind)
    _skip(fields, end, int(nbytes))
    return type(name, (ctypes.Structure,), {"_pack_": 1, "_fields_": fields})


def words(name: str, values: Mapping[str, int]) -> list[int]:
    """The values of a struct whose fields are all int64, in the order of the fields.

    `values` has the fields by name, and may have more. Raises KeyError if it lacks one.
    """
    return [values[field.partition(":")[0]] for field in _reported()[name][1:]]


def place(name: str, field: str) -> int:
    """The index of a field, if the struct is read as an array of elements of the field's size."""
    descriptor = getattr(struct(name), field)
    return descriptor.offset // descriptor.size


def _skip(fields: list[tuple[str, type]], begin: int, end: int) -> None:
    """Add a field for the padding from `begin` to `end`, if there is any."""
    if begin < end:
        fields.append((f"_{begin}", ctypes.c_char * (end - begin)))


@cache
def _reported() -> dict[str, list[str]]:
    """What the library reports, by the name of a struct or an enumeration: its bytes, then its
    fields or values, as texts.
    """
    reported = {}
    for line in ops.layouts().splitlines():
        name, *described = line.split()
        reported[name] = described
    return reported
