"""The report's charts, as HTML that `report.css.j2` gives its colours and sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from epmoe.cli.console import human_seconds, share
from epmoe.cli.result import STAGES, Balancing, Result, by_rank, imbalance, mean_stages
from epmoe.cli.tables import times

# With more ranks, a chart that has a bar or a line for each rank shows one for all of them.
MOST_RANKS = 16
# With more ranks, the cells of a heat map have no numbers in them.
MOST_LABELLED = 16
# Parts into which a run is divided.
MOST_PARTS = 12


class Tick(NamedTuple):
    """A mark of an axis."""

    percent: float
    """its place on the axis"""
    label: str


class Axis(NamedTuple):
    """An axis from 0."""

    end: float
    """the value at its end"""
    ticks: list[Tick]


class Cell(NamedTuple):
    """A cell of a heat map: its value in words, and where the value lies between the lowest, 0, and
    the highest, 1.
    """

    text: str
    title: str
    level: float
    own: bool = False
    """whether the cell is of a rank and itself, which the colours leave out"""


def element(name: str, *content: object, **attributes: object) -> Markup:
    """`<name key="value">content</name>`. Empty ones are left out; `class_` is class, `aria_label`
    is aria-label.
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
    """The parts one after the other; what is no HTML yet is escaped."""
    return Markup("").join(map(escape, content))


def stages(result: Result) -> Markup:
    """Draw the seconds of each stage: a bar for the single process (the mean over ranks), and one
    for each rank.
    """
    # Choose the bars: many ranks get one for all.
    named = [(f"rank {rank}", seconds) for rank, seconds in enumerate(result.stages)]
    if len(named) > MOST_RANKS:
        named = [(f"mean of {len(named)} ranks", result.seconds)]
    if result.baseline:
        named.insert(0, ("one process", mean_stages(result.baseline.stages)))
    top, ticks = axis(max(sum(seconds.values()) for _, seconds in named), human_seconds)
    # Draw each bar with its name and its total, over a grid.
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
    # Draw the axis below.
    labels = (element("span", tick.label, style=f"left:{tick.percent}%") for tick in ticks)
    parts += [
        element("div", class_="corner"),
        element("div", *labels, class_="xaxis"),
        element("div"),
    ]
    return element("div", *parts, class_=f"bars{' many' * (len(named) > 8)}")


def _fill(name: str, stage_seconds: Mapping[str, float], top: float) -> Iterator[Markup]:
    """Draw the pieces of a bar, one for each stage that took time. A bar of `top` seconds has the
    full width.
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
    """Draw the heat map of the rows from rank to rank."""
    words = ("from", "to", "rows on the wire", "not on the wire")
    return _pairs(result.traffic, *words, lambda rows: f"{rows:,.0f}", " rows")


def waits(result: Result) -> Markup:
    """Draw the heat map of the time that each rank waited for each other rank."""
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
    """Draw a heat map of [R][R] values, with a rank for each row and column. A rank's value for
    itself has no colour.
    """
    ranks = range(len(values))
    # Colours go from the lowest to the highest value of two different ranks.
    others = []
    for i, row in enumerate(values):
        others += [value for j, value in enumerate(row) if i != j]
    low = min(others, default=0)
    top = max(others, default=0)

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

    key = (element("span", class_="own key"), element("span", f"{across} itself: {itself}"))
    heads = [_number(rank, len(ranks)) for rank in ranks]
    grid = _grid(f"{across} rank", down, heads, cells)
    return element("div", grid, _scale(label(low), what, label(top), *key), class_="heat")


def balance(balancing: Balancing) -> Markup:
    """Draw the load of each rank over the mean: ranks as rows, parts of the run as columns."""
    # Divide the run into parts of about as many rounds, and add the load of each rank in each.
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

    # A row of cells for each rank.
    cells = []
    for rank in range(ranks):
        row_cells = []
        for (begin, end), of_ranks in zip(spans, ratios, strict=True):
            ratio = of_ranks[rank]
            text = f"{ratio:.2f}"
            title = f"rank {rank}, rounds {begin + 1} to {end}: {text}× the mean"
            row_cells.append(Cell(text, title, (ratio - low) / (top - low or 1)))
        cells.append(row_cells)

    # Below the ranks: the busiest one, and the moves that began in each part.
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
    """Draw a line of a heat map without colours."""
    cells = (element("td", value, class_="corner") for value in values)
    return element("tr", element("th", name, scope="row"), *cells)


def _grid(
    caption: str, corner: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *below: Markup
) -> Markup:
    """Draw the cells of a heat map, with a rank for each row. With many ranks they are small and
    have no text.
    """
    is_labelled = len(rows) <= MOST_LABELLED
    names = (element("th", head, scope="col") for head in heads)
    lines = [element("tr", element("td", corner, class_="corner"), *names)]
    for rank, row in enumerate(rows):
        cells = (_cell(cell, is_labelled) for cell in row)
        lines.append(element("tr", element("th", _number(rank, len(rows)), scope="row"), *cells))
    # Many ranks get the room of as many columns, so that cells are square.
    columns = len(heads)
    css = "cells"
    if not is_labelled:
        columns = max(len(heads), len(rows))
        css = "cells small"
    style = f"--n:{columns}"
    table = element("table", element("caption", caption), *lines, *below, class_=css, style=style)
    return element("div", table, class_="scroll", tabindex=0)


def _cell(cell: Cell, is_labelled: bool) -> Markup:
    text = cell.text if is_labelled else ""
    if cell.own:
        return element("td", text, class_="own", title=cell.title)
    return element("td", text, style=f"--v:{100 * cell.level:.0f}%", title=cell.title)


def _scale(low: str, what: str, top: str, *key: Markup) -> Markup:
    """Draw the colours of a heat map, with the values at their ends."""
    ends = element("span", *(element("span", word) for word in (low, what, top)), class_="ends")
    css = "scale" if key else "scale plain"
    return element("div", *key, element("span", class_="ramp"), ends, class_=css)


def _number(rank: int, ranks: int) -> str:
    """The number of a rank at the edge of a heat map. Of many ranks only every fourth or eighth has
    one.
    """
    step = 8
    if ranks <= MOST_LABELLED:
        step = 1
    elif ranks <= 32:
        step = 4
    return f"{rank}" if rank % step == 0 else ""


def loads(result: Result) -> Markup:
    """Draw the tokens of each physical expert as bars, rank by rank."""
    holder = result.holder
    R = result.placement.ep_size
    mean = sum(result.load) / len(result.load)
    top, ticks = axis(max(result.load), lambda value: f"{value:,.0f}", whole=True)
    gap = f"gap:min(22px,{24 / R:.2f}%)"

    # Bars rank by rank, with the names of ranks below.
    groups = []
    below = []
    for rank, experts in enumerate(by_rank(result.placement, range(len(result.load)))):
        width = f"flex:{len(experts)}"
        bars = [_load_bar(result, rank, expert, mean, top) for expert in experts]
        groups.append(element("div", *bars, style=width))
        # As much of the name as there is room for.
        name = ""
        if R <= 6:
            name = f"rank {rank}"
        elif R <= 16 or rank % 8 == 0:
            name = f"{rank}"
        below.append(element("span", name, style=width))
    # The axis on the left, a grid, and a line for the mean.
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
    # Numbers alone need a word.
    if R > 6:
        parts.append(element("div", element("span", "rank"), class_="x"))
    return join(parts)


def _load_bar(result: Result, rank: int, expert: int, mean: float, top: float) -> Markup:
    """Draw the bar of one expert or slot. A load of `top` tokens has the full height."""
    load = result.load[expert]
    name = f"{result.holder} {expert}"
    logical = result.placement.logical(expert)
    if logical != expert and result.holder == "expert":
        name += f" (copy of {logical})"
    ratio = times(load / (mean or 1))
    title = f"{name} on rank {rank}: {load:,} tokens, {ratio} the mean"
    return element("i", element("b", style=f"height:{100 * load / top:.2f}%"), title=title)


def axis(top: float, label: Callable[[float], str], whole: bool = False) -> Axis:
    """Make an axis that holds `top`, with three to six ticks at round numbers. With `whole` they
    are integers.
    """
    if not (top > 0 and math.isfinite(top)):
        top = 1.0
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 4)
    if whole:
        step = max(1.0, step)
    count = math.ceil(top / step - 1e-9)
    ticks = [Tick(0.0, "0")]
    ticks += [Tick(100 * n / count, label(n * step)) for n in range(1, count + 1)]
    return Axis(count * step, ticks)
