"""A tuning table: which blocks and warps the kernels take for how many tokens, as measured on this machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from epmoe.config import Strict, explain
from epmoe.config_file import ConfigError, read_config


class Launch(Strict):
    """How the kernels of the exchange are launched (CUDA); 0 leaves it to them."""

    dispatch_senders: int = Field(default=0, ge=0, le=1024)
    """Blocks of dispatch that send."""
    combine_senders: int = Field(default=0, ge=0, le=1024)
    """Blocks of combine that send."""
    combine_team: int = Field(default=0, ge=0, le=32)
    """Warps that send a row together in combine."""


class TuningRow(Launch):
    """The launch for calls of one hidden size and group size, up to a number of tokens."""

    tokens: int = Field(ge=0, le=2**20)
    """T up to which this row holds, from that of the row before; past the last row the kernels choose."""
    hidden_size: int = Field(ge=1, le=65536)
    """D of the calls."""
    ranks: int = Field(ge=1, le=64)
    """R of the group."""


class Tuning(Strict):
    """What `exchange.tuning` names: a YAML, TOML or JSON file that holds `rows`."""

    rows: tuple[TuningRow, ...] = Field(strict=False)  # a file's list

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Raises ConfigError, which names the file and what is wrong with it."""
        try:
            return cls(**read_config(path, holds="a list `rows:`"))
        except ValidationError as error:
            lines = []
            for item in error.errors():
                beside = TuningRow if len(item["loc"]) > 1 else cls
                lines.append(explain(item, tuple(beside.model_fields)))
            raise ConfigError(f"{path}: " + "\n".join(lines)) from None

    @model_validator(mode="after")
    def _check(self) -> Tuning:
        seen: set[tuple[int, int, int]] = set()
        for i, row in enumerate(self.rows):
            place = row.hidden_size, row.ranks, row.tokens
            if place in seen:
                raise ValueError(f"`rows[{i}]` must be the only one for these tokens, hidden_size and ranks")
            seen.add(place)
        return self

    def steps(self, hidden_size: int, ranks: int) -> tuple[list[int], list[dict[str, int]]]:
        """Ascending numbers of tokens up to which each launch holds, and the launches, which are one more.

        With i = bisect_left(tokens, T), launches[i] is that for T tokens.
        """
        rows = [row for row in self.rows if (row.hidden_size, row.ranks) == (hidden_size, ranks)]
        rows.sort(key=lambda row: row.tokens)
        launches = [row.model_dump(include=set(Launch.model_fields)) for row in rows]
        return [row.tokens for row in rows], [*launches, Launch().model_dump()]
