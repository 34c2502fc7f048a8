"""Draws the charts of the report.

A chart is a piece of HTML. The style sheet `report.css.j2` gives it colours and sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from epmoe.cli.console import human_seconds, share
from epmoe.cli.result import STAGES, Balancing, Result, by_rank, imbalance, mean_stages
from epmoe.cli.tables import times

# A chart with a bar for each rank shows a single bar, their mean, if there are more ranks.
MOST_RANKS = 16
# The cells of a heat map show their numbers only if there are at most this many ranks.
MOST_LABELLED = 16
# The chart of the balance divides a run into at most this many parts.
MOST_PARTS = 12


class Tick(NamedTuple):
    """A mark on an axis."""

    percent: float
    """the place of the mark, in percent of the length of the axis"""
    label: str
    """the text beside the mark"""


class Axis(NamedTuple):
    """An axis that begins at 0."""

    end: float
    """the value at its end"""
    ticks: list[Tick]
    """the marks, the first of which is at 0"""


class Cell(NamedTuple):
    """A cell of a heat map."""

    text: str
    """the value, as the cell shows it"""
    title: str
    """the sentence that a browser shows under the pointer"""
    level: float
    """the colour: 0 for the lowest value of the map, 1 for the highest"""
    own: bool = False
    """whether the value is one of a rank for itself; such a cell has no colour"""


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Make the element `<name key="value">content</name>`.

    Attributes that are "" or None are left out. Python's names of attributes become those of HTML:
    `class_` becomes `class`, and `aria_label` becomes `aria-label`.
    """
    words = []
    for key, value in attributes.items():
        if value not in ("", None):
            html_key = key.rstrip("_").replace("_", "-")
            words.append(Markup(' {}="{}"').format(html_key, value))
    return Markup("<{}{}>{}</{}>").format(
        Markup(name), Markup("").join(words), join(content), Markup(name)
    )


def join(content: Iterable[object]) -> Markup:
    """Put parts one after the other. Parts that are not HTML yet are escaped."""
    return Markup("").join(map(escape, content))


def stages(result: Result) -> Markup:
    """Draw the seconds of each stage: one bar for each rank.

    If the result has a baseline, a bar of the single process stands first. It is the mean of the
    runs that the ranks have made alone.
    """
    # Choose the bars. Many ranks get a single bar, their mean.
    named = [(f"rank {rank}", seconds) for rank, seconds in enumerate(result.stages)]
    if len(named) > MOST_RANKS:
        named = [(f"mean of {len(named)} ranks", result.seconds)]
    if result.baseline:
        named.insert(0, ("one process", mean_stages(result.baseline.stages)))
    top, ticks = axis(max(sum(seconds.values()) for _, seconds in named), human_seconds)
    # Draw each bar on a grid, with its name before it and its total behind it.
    grid = join(element("i", class_="grid", style=f"left:{tick.percent}%") for tick in ticks)
    parts = []
    for name, seconds in named:
        total = human_seconds(sum(seconds.values()), zeros=True)
        track = join((grid, element("div", *_fill(name, seconds, top), class_="fill")))
        parts.append(element("div", name, class_="name"))
        parts.append(
            element("div", track, class_="track", role="img", aria_label=f"{name}: {total}")
        )
        parts.append(element("div", total, class_="total"))
    # Draw the axis below the bars.
    labels = (element("span", tick.label, style=f"left:{tick.percent}%") for tick in ticks)
    parts += [
        element("div", class_="corner"),
        element("div", *labels, class_="xaxis"),
        element("div"),
    ]
    return element("div", *parts, class_=f"bars{' many' * (len(named) > 8)}")


def _fill(name: str, stage_seconds: Mapping[str, float], top: float) -> Iterator[Markup]:
    """Draw the pieces of the bar `name`, one for each stage that took time.

    A bar of `top` seconds has the full width.
    """
    total = sum(stage_seconds.values())
    of_total = f"of {human_seconds(total, zeros=True)}"
    for stage in STAGES:
        seconds = stage_seconds.get(stage, 0.0)
        if not seconds:
            continue
        label = element("b", stage, class_=f"chars-{len(stage)}")
        title = (
            f"{name}, {stage}: {human_seconds(seconds, zeros=True)}, "
            f"{share(seconds / total)} {of_total}"
        )
        css = f"st-{stage.replace(' ', '-')}"
        width = f"width:{100 * seconds / top:.3f}%"
        yield element("i", label, class_=css, data_stage=stage, style=width, title=title)


def traffic(result: Result) -> Markup:
    """Draw how many rows each rank sent to each other rank, as a heat map."""
    words = ("from", "to", "rows on the wire", "not on the wire")
    return _pairs(result.traffic, *words, lambda rows: f"{rows:,.0f}", " rows")


def waits(result: Result) -> Markup:
    """Draw how long each rank waited for each other rank, as a heat map."""
    words = ("rank", "for", "time waited", "never")
    return _pairs(result.waited, *words, lambda seconds: human_seconds(seconds) if seconds else "0")


def _pairs(
    values: Sequence[Sequence[float]],
    down: str,
    across: str,
    what: str,
    itself: str,
    label: Callable[[float], str],
    unit: str = "",
) -> Markup:
    """Draw a heat map of `values` [R][R], where R is the number of ranks. Each rank has a row and
    a column.

    `down` and `across` are the words at the rows and at the columns, and `what` is the word at the
    scale of colours. A rank's value for itself has no colour; `itself` says why. `label` writes a
    value, and `unit` follows it.
    """
    ranks = range(len(values))
    # The scale of colours goes from the lowest to the highest value of two different ranks.
    others = []
    for i, row in enumerate(values):
        others += [value for j, value in enumerate(row) if i != j]
    low = min(others, default=0)
    top = max(others, default=0)

    # Make the cells.
    cells = []
    for i in ranks:
        row_cells = []
        for j in ranks:
            value = values[i][j]
            whom = "itself" if i == j else f"rank {j}"
            title = f"rank {i} {across} {whom}: {label(value)}{unit}"
            level = (value - low) / (top - low or 1)
            row_cells.append(Cell(label(value), title, level, own=i == j))
        cells.append(row_cells)

    # Put them into a grid, with the scale of colours below.
    key = (element("span", class_="own key"), element("span", f"{across} itself: {itself}"))
    heads = [_number(rank, len(ranks)) for rank in ranks]
    grid = _grid(f"{across} rank", down, heads, cells)
    return element("div", grid, _scale(label(low), what, label(top), *key), class_="heat")


def balance(balancing: Balancing) -> Markup:
    """Draw the load of each rank, divided by the mean load, as a heat map.

    Each row is that of a rank, and each column is that of a part of the run.
    """
    # Divide the run into parts of about equally many rounds. Add up each rank's load in each part.
    rounds = len(balancing.rows[0])
    ranks = len(balancing.rows)
    count = min(rounds, MOST_PARTS)
    spans = list(itertools.pairwise(rounds * n // count for n in range(count + 1)))
    loads = []
    ratios = []
    for begin, end in spans:
        of_part = [sum(rows[begin:end]) for rows in balancing.rows]
        total = sum(of_part) or 1
        loads.append(of_part)
        ratios.append([load * ranks / total for load in of_part])
    low = min(map(min, ratios))
    top = max(map(max, ratios))

    # Make a row of cells for each rank.
    cells = []
    for rank in range(ranks):
        row_cells = []
        for (begin, end), of_ranks in zip(spans, ratios, strict=True):
            ratio = of_ranks[rank]
            text = f"{ratio:.2f}"
            title = f"rank {rank}, rounds {begin + 1} to {end}: {text}× the mean"
            row_cells.append(Cell(text, title, (ratio - low) / (top - low or 1)))
        cells.append(row_cells)

    # Below the ranks stand two lines: the load of the busiest rank, and how many moves of experts
    # began in each part.
    busiest = [f"{imbalance(load) or 1:.2f}" for load in loads]
    moves = []
    for begin, end in spans:
        moves.append(sum(number for tick, number in balancing.moves if begin < tick <= end))
    below = (_line_below("most", busiest), _line_below("moves", moves))
    heads = [f"{begin + 1}" for begin, _ in spans]
    grid = _grid("from round", "rank", heads, cells, *below)
    scale = _scale(f"{low:.2f}×", "load of a rank, over the mean", f"{top:.2f}×")
    return element("div", grid, scale, class_="heat")


def _line_below(name: str, values: Iterable[object]) -> Markup:
    """Draw a line of values below a heat map. It has no colours."""
    cells = (element("td", value, class_="corner") for value in values)
    return element("tr", element("th", name, scope="row"), *cells)


def _grid(
    caption: str, corner: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *below: Markup
) -> Markup:
    """Draw the cells of a heat map as a table. Each row is that of a rank.

    `caption` stands above the columns, `heads` are the names of the columns, and `corner` is the
    word above the names of the rows. The lines `below` follow the rows. With many ranks the cells
    are small and have no text.
    """
    is_labelled = len(rows) <= MOST_LABELLED
    names = (element("th", head, scope="col") for head in heads)
    lines = [element("tr", element("td", corner, class_="corner"), *names)]
    for rank, row in enumerate(rows):
        cells = (_cell(cell, is_labelled) for cell in row)
        lines.append(element("tr", element("th", _number(rank, len(rows)), scope="row"), *cells))
    # Small cells are square: the table is as wide as one with a column for each row.
    columns = len(heads)
    css = "cells"
    if not is_labelled:
        columns = max(len(heads), len(rows))
        css = "cells small"
    style = f"--n:{columns}"
    table = element("table", element("caption", caption), *lines, *below, class_=css, style=style)
    return element("div", table, class_="scroll", tabindex=0)


def _cell(cell: Cell, is_labelled: bool) -> Markup:
    """Draw one cell, with its text if `is_labelled`."""
    text = cell.text if is_labelled else ""
    if cell.own:
        return element("td", text, class_="own", title=cell.title)
    return element("td", text, style=f"--v:{100 * cell.level:.0f}%", title=cell.title)


def _scale(low: str, what: str, top: str, *key: Markup) -> Markup:
    """Draw the scale of a heat map's colours, with the values `low` and `top` at its ends and the
    word `what` between them. `key` explains cells that have no colour.
    """
    ends = element("span", *(element("span", word) for word in (low, what, top)), class_="ends")
    css = "scale" if key else "scale plain"
    return element("div", *key, element("span", class_="ramp"), ends, class_=css)


def _number(rank: int, ranks: int) -> str:
    """Return the number of a rank for the edge of a heat map.

    There is no room for the numbers of many ranks. Then every fourth or eighth rank has its number,
    and the others have none.
    """
    step = 8
    if ranks <= MOST_LABELLED:
        step = 1
    elif ranks <= 32:
        step = 4
    return f"{rank}" if rank % step == 0 else ""


def loads(result: Result) -> Markup:
    """Draw how many tokens each expert or slot has had, as bars, rank by rank."""
    holder = result.holder
    R = result.placement.ep_size
    mean = sum(result.load) / len(result.load)
    top, ticks = axis(max(result.load), lambda value: f"{value:,.0f}", whole=True)
    gap = f"gap:min(22px,{24 / R:.2f}%)"

    # Draw the bars rank by rank, and the name of each rank below its bars.
    groups = []
    below = []
    for rank, experts in enumerate(by_rank(result.placement, range(len(result.load)))):
        width = f"flex:{len(experts)}"
        bars = [_load_bar(result, rank, expert, mean, top) for expert in experts]
        groups.append(element("div", *bars, style=width))
        # The name is as long as there is room for: a word and a number, a number, or nothing.
        name = ""
        if R <= 6:
            name = f"rank {rank}"
        elif R <= 16 or rank % 8 == 0:
            name = f"{rank}"
        below.append(element("span", name, style=width))
    # Draw the axis on the left, a grid, and a line at the mean.
    axis_labels = (element("span", t.label, style=f"top:{100 - t.percent}%") for t in ticks)
    lines = (element("i", class_="grid", style=f"top:{100 - tick.percent}%") for tick in ticks)
    mean_label = element("b", f"mean {mean:,.0f}")
    limit = element("i", mean_label, class_="limit", style=f"top:{100 - 100 * mean / top}%")
    all_bars = element("div", *groups, class_="groups", style=gap)
    caption = f"Tokens of each {holder}, rank by rank"
    area = element("div", *lines, all_bars, limit, class_="area", role="img", aria_label=caption)
    parts = [
        element("div", element("div", *axis_labels, class_="y"), area, class_="plot load"),
        element("div", *below, class_="x groups", style=gap),
    ]
    # Where the names are numbers alone, the word "rank" stands below them.
    if R > 6:
        parts.append(element("div", element("span", "rank"), class_="x"))
    return join(parts)


def _load_bar(result: Result, rank: int, expert: int, mean: float, top: float) -> Markup:
    """Draw the bar of one expert or slot of a rank. A load of `top` tokens has the full height."""
    load = result.load[expert]
    name = f"{result.holder} {expert}"
    logical = result.placement.logical(expert)
    if logical != expert and result.holder == "expert":
        name += f" (copy of {logical})"
    ratio = times(load / (mean or 1))
    title = f"{name} on rank {rank}: {load:,} tokens, {ratio} the mean"
    return element("i", element("b", style=f"height:{100 * load / top:.2f}%"), title=title)


def axis(top: float, label: Callable[[float], str], whole: bool = False) -> Axis:
    """Make an axis from 0 to `top` or a little more, with at most five ticks at round numbers.

    `label` writes the number of a tick. With `whole` all ticks are integers.
    """
    # A chart in which all values are 0, or one is infinite, gets an axis all the same.
    if not (top > 0 and math.isfinite(top)):
        top = 1.0
    # The step is the smallest of 1, 2, 5 and 10 times a power of ten that divides the axis into at
    # most four steps.
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 4)
    if whole:
        step = max(1.0, step)
    # A quotient that is an integer but for rounding needs no further step.
    count = math.ceil(top / step - 1e-9)
    ticks = [Tick(0.0, "0")]
    ticks += [Tick(100 * n / count, label(n * step)) for n in range(1, count + 1)]
    return Axis(count * step, ticks)
