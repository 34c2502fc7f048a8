"""`epmoe plan CONFIG --predict`: µs of dispatch and combine by T, as `NetworkModel` has them, with their terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from epmoe.config.config import EPConfig
from epmoe.network_model import NetworkModel, RowBytes, Terms


def predicted(config: EPConfig, tokens: Sequence[int]) -> dict[str, Any]:
    """For `--json`: what the model assumes, and µs for each T of `tokens`.

    With padded splits the slabs of T tokens have T slots, as with `padded_tokens=T`, at most
    `capacity.max_rows_per_node`.
    """
    model = NetworkModel.of(config)
    out, back = RowBytes.of_dispatch(config), RowBytes.of_combine(config)
    exact = config.exchange.network_splits == "exact"
    rounds = []
    for T in tokens:
        slots = None if exact else min(T, config.rows_per_node)
        line: dict[str, Any] = {
            "tokens": T,
            "dispatch": _rounded(model.two_levels(T, out, slots, counts=exact)),
            "combine": _rounded(model.two_levels(T, back, slots)),
        }
        if model.nodes > 1:
            line["pipelined_us"] = round(model.pipelined_us(T, out) + model.pipelined_us(T, back), 1)
            line["direct_us"] = round(model.direct_us(T, out) + model.direct_us(T, back), 1)
        rounds.append(line)
    return {
        "nodes": model.nodes,
        "ranks_per_node": model.ranks_per_node,
        "nodes_per_token": round(model.spread.nodes, 2),
        "ranks_per_token": round(model.spread.ranks, 2),
        "network_splits": config.exchange.network_splits,
        "hardware": config.hardware.model_dump(),
        "rounds": rounds,
    }


def prediction(content: dict[str, Any]) -> Iterator[str | Table]:
    """What `predicted` holds, as a paragraph and a table; 80 columns hold them."""
    yield _paragraph(content)
    terms = ("network", "node") if content["nodes"] > 1 else ()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("T", "dispatch", *terms, "combine", *terms, *(("pipelined", "direct") if terms else ())):
        style = "bold" if column in ("dispatch", "combine") else ""
        table.add_column(column, justify="right", no_wrap=True, style=style)
    for line in content["rounds"]:
        ways = (line["dispatch"], line["combine"])
        cells = [way[f"{name}us"] for way in ways for name in ("", *(f"{term}_" for term in terms))]
        cells += [line["pipelined_us"], line["direct_us"]] if terms else []
        table.add_row(f"{line['tokens']}", *(f"{us:,.1f}" if us < 100 else f"{us:,.0f}" for us in cells))
    yield table


def _paragraph(content: dict[str, Any]) -> str:
    N, G, first = content["nodes"], content["ranks_per_node"], content["rounds"][0]
    what = (
        f"[bold]Predicted µs by T[/] on {N} × {G} GPUs, from the constants in `hardware`. "
        f"A token needs {content['ranks_per_token']} of {N * G} ranks"
    )
    if N == 1:
        return f"{what}."
    counts, start = first["dispatch"]["counts_us"], first["dispatch"]["start_us"]
    slabs = "Slabs have exact lengths" if counts else "Slabs have T slots, as with `padded_tokens=T`"
    look = f", dispatch also with {counts} µs until the host has read the counts" if counts else ""
    return (
        f"{what}, on {content['nodes_per_token']} of {N} nodes. {slabs}. Each way starts with {start} µs of the "
        f"collective{look}; then come its rows on the network and the exchange within the node. A round of two other "
        "designs, whose kernels write to other nodes: pipelined, two levels in chunks; direct, a row for each expert."
    )


def _rounded(terms: Terms) -> dict[str, float]:
    parts = {name: round(value, 1) for name, value in dataclasses.asdict(terms).items()}
    return {"us": round(terms.us, 1), **parts}
