"""The structs and constants of C++ that Python reads or writes, as the native library reports them.

A struct is a class of ctypes: `struct("Status").from_address(address).code` reads a word as fast as
an array does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

from epmoe.native import ops


@cache
def numbers(name: str) -> dict[str, int]:
    """The values of an enumeration of csrc, or of its other constants, by name. Raises KeyError as
    `struct` does.
    """
    return {
        key: int(value) for key, _, value in (part.partition(":") for part in _reported()[name][1:])
    }


@cache
def constant(name: str) -> int:
    """The value of a constant of csrc. Raises KeyError for what csrc/ops_layouts.cpp does not
    report.
    """
    return numbers("constants")[name]


def bits(name: str, word: int) -> dict[str, int]:
    """The fields of bits of a struct, read from its word."""
    fields = (part.split(":") for part in _reported()[name][1:])
    return {field: word >> int(first) & (1 << int(count)) - 1 for field, count, first in fields}


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """Make the ctypes class of a struct of csrc, with the fields that csrc/ops_layouts.cpp reports.
    Raises KeyError if it does not report the struct.
    """
    nbytes, *described = _reported()[name]
    fields: list[tuple[str, type]] = []
    end = 0
    for field in described:
        named, element, count, offset = field.split(":")
        bits = int(element.removeprefix("u").removeprefix("int"))
        # Where ctypes has no such type, it is a struct within the struct: bytes.
        kind = getattr(ctypes, f"c_{element}", ctypes.c_char * (bits // 8))
        kind = kind * int(count) if count != "1" else kind
        _skip(fields, end, int(offset))
        fields.append((named, kind))
        end = int(offset) + ctypes.sizeof(kind)
    _skip(fields, end, int(nbytes))
    return type(name, (ctypes.Structure,), {"_pack_": 1, "_fields_": fields})


def words(name: str, values: Mapping[str, int]) -> list[int]:
    """The int64 fields of a struct in their order. Raises KeyError if `values` lacks one."""
    return [values[field.partition(":")[0]] for field in _reported()[name][1:]]


def place(name: str, field: str) -> int:
    """The number of a field in a struct that counts in words of the field's size."""
    found = getattr(struct(name), field)
    return found.offset // found.size


def _skip(fields: list[tuple[str, type]], begin: int, end: int) -> None:
    """Add bytes without a name, if a field does not begin where the last one ends."""
    if begin < end:
        fields.append((f"_{begin}", ctypes.c_char * (end - begin)))


@cache
def _reported() -> dict[str, list[str]]:
    """The bytes of each struct, and its fields, by name; and the numbers of enumerations."""
    return {name: rest for name, *rest in map(str.split, ops.layouts().splitlines())}
