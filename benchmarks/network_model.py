"""Predicts the µs of an exchange over several nodes, and of two other designs.

    python -m benchmarks.network_model CONFIG [--network_gb_per_s 89 …]

The model is epmoe/bench/network_model.py, which docs/multinode-model.md explains.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields

from epmoe.bench.network_model import Hardware, NetworkModel, RowBytes, Terms
from epmoe.config.config import EPConfig

TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def table(config: EPConfig, hardware: Hardware) -> Iterator[str]:
    """The lines of a Markdown table: µs by T up to M, with their terms.

    The slabs of T tokens have T slots, as with `padded_tokens=T`, at most `capacity.max_rows_per_node`.
    """
    model = NetworkModel.of(config, hardware)
    out, back = RowBytes.of(config)
    M = config.capacity.max_num_tokens_per_rank
    terms = [name.removesuffix("_us") for name in Terms._fields]
    header = ["T", "dispatch", *terms, "combine", *terms] + ["pipelined", "direct"] * (model.nodes > 1)
    yield f"| {' | '.join(header)} |"
    yield f"|{'--:|' * len(header)}"
    for T in sorted({*(T for T in TOKENS if T < M), M}):
        slots = min(T, config.rows_per_node)
        ways = model.two_levels(T, out, slots), model.two_levels(T, back, slots)
        designs = [sum(of(T, row) for row in (out, back)) for of in (model.pipelined_us, model.direct_us)]
        figures = [us for way in ways for us in (sum(way), *way)] + (designs if model.nodes > 1 else [])
        yield f"| {T} | {' | '.join(f'{us:.1f}' for us in figures)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for a configuration, with the constants that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    for field in fields(Hardware):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    print(*table(EPConfig.load(given.pop("config")), Hardware(**given)), sep="\n")


if __name__ == "__main__":
    main()
