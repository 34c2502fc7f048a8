"""The report's charts, as HTML that `report.css.j2` gives its colours and sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from epmoe.cli.console import human_seconds, share
from epmoe.cli.result import STAGES, Balancing, Result, by_rank, imbalance, mean_stages
from epmoe.cli.tables import times

MOST_RANKS = (
    16  # with more, a chart that has a bar or a line for each rank shows one for all of them
)
MOST_LABELLED = 16  # with more ranks, the cells of a heat map have no numbers in them
MOST_PARTS = 12  # of a run


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
    words = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value not in ("", None)
    ]
    return Markup("<{}{}>{}</{}>").format(
        Markup(name), Markup("").join(words), join(content), Markup(name)
    )


def join(content: Iterable[object]) -> Markup:
    """The parts one after the other; what is no HTML yet is escaped."""
    return Markup("").join(map(escape, content))


def stages(result: Result) -> Markup:
    """Seconds by stage: a bar for the single process (the mean over ranks), and one
    for each rank.
    """
    named = [(f"rank {rank}", one) for rank, one in enumerate(result.stages)]
    if len(named) > MOST_RANKS:
        named = [(f"mean of {len(named)} ranks", result.seconds)]
    if result.baseline:
        named.insert(0, ("one process", mean_stages(result.baseline.stages)))
    top, ticks = axis(max(sum(one.values()) for _, one in named), human_seconds)
    grid = join(element("i", class_="grid", style=f"left:{at}%") for at, _ in ticks)
    parts = []
    for name, one in named:
        total = sum(one.values())
        whole = human_seconds(total, zeros=True)
        fill = []
        for stage in STAGES:
            seconds = one.get(stage, 0.0)
            if seconds:
                label = element("b", stage, class_=f"chars-{len(stage)}")
                title = (
                    f"{name}, {stage}: {human_seconds(seconds, zeros=True)}, "
                    f"{share(seconds / total)} of {whole}"
                )
                css = f"st-{stage.replace(' ', '-')}"
                width = f"width:{100 * seconds / top:.3f}%"
                fill.append(
                    element("i", label, class_=css, data_stage=stage, style=width, title=title)
                )
        parts.append(element("div", name, class_="name"))
        track = join((grid, element("div", *fill, class_="fill")))
        parts.append(
            element("div", track, class_="track", role="img", aria_label=f"{name}: {whole}")
        )
        parts.append(element("div", whole, class_="total"))
    labels = (element("span", label, style=f"left:{at}%") for at, label in ticks)
    parts += [
        element("div", class_="corner"),
        element("div", *labels, class_="xaxis"),
        element("div"),
    ]
    return element("div", *parts, class_=f"bars{' many' * (len(named) > 8)}")


def traffic(result: Result) -> Markup:
    """The heat map of the rows from rank to rank."""
    words = ("from", "to", "rows on the wire", "not on the wire")
    return _pairs(result.traffic, *words, lambda rows: f"{rows:,.0f}", " rows")


def waits(result: Result) -> Markup:
    """The heat map of the time that each rank waited for each other rank."""
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
    """A heat map of [R][R] values: a rank for each row and column. A rank's value for itself has no
    colour.
    """
    ranks = range(len(values))
    others = [one for i, row in enumerate(values) for j, one in enumerate(row) if i != j] or [0]
    low = min(others)
    top = max(others)

    def cell(i: int, j: int) -> Cell:
        one = values[i][j]
        whom = "itself" if i == j else f"rank {j}"
        return Cell(
            label(one),
            f"rank {i} {across} {whom}: {label(one)}{unit}",
            (one - low) / (top - low or 1),
            i == j,
        )

    key = (element("span", class_="own key"), element("span", f"{across} itself: {itself}"))
    heads = [_number(rank, len(ranks)) for rank in ranks]
    grid = _grid(f"{across} rank", down, heads, [[cell(i, j) for j in ranks] for i in ranks])
    return element("div", grid, _scale(label(low), what, label(top), *key), class_="heat")


def balance(balancing: Balancing) -> Markup:
    """The load of each rank over the mean: ranks as rows, parts of the run as columns."""
    rounds = len(balancing.rows[0])
    ranks = len(balancing.rows)
    count = min(rounds, MOST_PARTS)
    spans = list(itertools.pairwise(rounds * n // count for n in range(count + 1)))
    loads = [[sum(rows[begin:end]) for rows in balancing.rows] for begin, end in spans]
    over = [[load * ranks / (sum(part) or 1) for load in part] for part in loads]
    low = min(map(min, over))
    top = max(map(max, over))

    def cell(rank: int, n: int) -> Cell:
        text = f"{over[n][rank]:.2f}"
        begin, end = spans[n]
        title = f"rank {rank}, rounds {begin + 1} to {end}: {text}× the mean"
        return Cell(text, title, (over[n][rank] - low) / (top - low or 1))

    moves = [
        sum(moves for tick, moves in balancing.moves if begin < tick <= end) for begin, end in spans
    ]
    busiest = [f"{imbalance(load) or 1:.2f}" for load in loads]
    below = [
        element(
            "tr",
            element("th", name, scope="row"),
            *(element("td", one, class_="corner") for one in cells),
        )
        for name, cells in (("most", busiest), ("moves", moves))
    ]
    heads = [f"{begin + 1}" for begin, _ in spans]
    grid = _grid(
        "from round",
        "rank",
        heads,
        [[cell(i, n) for n in range(count)] for i in range(ranks)],
        *below,
    )
    return element(
        "div",
        grid,
        _scale(f"{low:.2f}×", "load of a rank, over the mean", f"{top:.2f}×"),
        class_="heat",
    )


def _grid(
    caption: str, corner: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *below: Markup
) -> Markup:
    """The cells of a heat map, a rank for each row; with many ranks small ones, without their
    texts.
    """
    labelled = len(rows) <= MOST_LABELLED
    lines = [
        element(
            "tr",
            element("td", corner, class_="corner"),
            *(element("th", one, scope="col") for one in heads),
        )
    ]
    for rank, row in enumerate(rows):
        cells = []
        for one in row:
            css, style = ("own", "") if one.own else ("", f"--v:{100 * one.level:.0f}%")
            cells.append(
                element(
                    "td", one.text if labelled else "", class_=css, style=style, title=one.title
                )
            )
        lines.append(element("tr", element("th", _number(rank, len(rows)), scope="row"), *cells))
    # how many columns' room they get
    style = f"--n:{len(heads) if labelled else max(len(heads), len(rows))}"
    css = f"cells{' small' * (not labelled)}"
    table = element("table", element("caption", caption), *lines, *below, class_=css, style=style)
    return element("div", table, class_="scroll", tabindex=0)


def _scale(low: str, what: str, top: str, *key: Markup) -> Markup:
    """The colours of a heat map, with the values at their ends."""
    ends = element("span", *(element("span", word) for word in (low, what, top)), class_="ends")
    return element(
        "div", *key, element("span", class_="ramp"), ends, class_="scale" if key else "scale plain"
    )


def _number(rank: int, ranks: int) -> str:
    """A rank at the edge of a heat map; of many ranks every fourth or eighth."""
    step = 8
    if ranks <= MOST_LABELLED:
        step = 1
    elif ranks <= 32:
        step = 4
    return f"{rank}" if rank % step == 0 else ""


def loads(result: Result) -> Markup:
    """Tokens of each physical expert, as bars, rank by rank."""
    placement = result.placement
    holder = result.holder
    R = result.placement.ep_size
    mean = sum(result.load) / len(result.load)
    top, ticks = axis(max(result.load), lambda value: f"{value:,.0f}", whole=True)
    gap = f"gap:min(22px,{24 / R:.2f}%)"

    def bar(rank: int, expert: int) -> Markup:
        load = result.load[expert]
        logical = placement.logical(expert)
        copy = f" (copy of {logical})" if logical != expert and holder == "expert" else ""
        title = (
            f"{holder} {expert}{copy} on rank {rank}: {load:,} tokens, {times(load / (mean or 1))} "
            f"the mean"
        )
        return element("i", element("b", style=f"height:{100 * load / top:.2f}%"), title=title)

    groups = []
    below = []
    for rank, experts in enumerate(by_rank(placement, range(len(result.load)))):
        width = f"flex:{len(experts)}"
        groups.append(element("div", *(bar(rank, expert) for expert in experts), style=width))
        # As much of the name as there is room for.
        name = ""
        if R <= 6:
            name = f"rank {rank}"
        elif R <= 16 or rank % 8 == 0:
            name = f"{rank}"
        below.append(element("span", name, style=width))
    axis_labels = (element("span", label, style=f"top:{100 - at}%") for at, label in ticks)
    lines = (element("i", class_="grid", style=f"top:{100 - at}%") for at, _ in ticks)
    limit = element(
        "i",
        element("b", f"mean {mean:,.0f}"),
        class_="limit",
        style=f"top:{100 - 100 * mean / top}%",
    )
    bars = element("div", *groups, class_="groups", style=gap)
    area = element(
        "div",
        *lines,
        bars,
        limit,
        class_="area",
        role="img",
        aria_label=f"Tokens of each {holder}, rank by rank",
    )
    return join(
        (
            element("div", element("div", *axis_labels, class_="y"), area, class_="plot load"),
            element("div", *below, class_="x groups", style=gap),
            element("div", element("span", "rank"), class_="x") if R > 6 else "",
        )
    )


def axis(
    top: float, label: Callable[[float], str], whole: bool = False
) -> tuple[float, list[tuple[float, str]]]:
    """The end of an axis from 0 that holds `top`, and three to six ticks at round numbers:
    (percent, label).
    """
    top = top if top > 0 and math.isfinite(top) else 1.0
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 4)
    step = max(1.0, step) if whole else step
    count = math.ceil(top / step - 1e-9)
    return count * step, [
        (100 * n / count, label(n * step) if n else "0") for n in range(count + 1)
    ]
