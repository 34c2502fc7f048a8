"""The tuning table: launch parameters of the kernels by number of tokens, as measured on one machine (CUDA)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from epmoe.config.config_file import ConfigError, explain, read_config
from epmoe.config.strict import Strict


class Launch(Strict):
    """How the kernels of the exchange are launched (CUDA). 0 leaves the choice to csrc/launch_policy.h."""

    dispatch_senders: int = Field(default=0, ge=0, le=1024)
    """Blocks of dispatch that start as senders."""
    combine_senders: int = Field(default=0, ge=0, le=1024)
    """Blocks of combine that start as senders."""
    combine_team: int = Field(default=0, ge=0, le=32)
    """Warps of combine that send a row together; the Simple protocol only."""


class TuningRow(Launch):
    """The launch for calls of one hidden size and group size, up to a number of tokens."""

    tokens: int = Field(ge=0, le=2**20)
    """The row holds for calls of up to this T, down to the next smaller row. Past the largest row no row holds."""
    hidden_size: int = Field(ge=1, le=65536)
    """D of the call."""
    ranks: int = Field(ge=1, le=64)
    """R of the group."""


class Tuning(Strict):
    """The contents of the YAML, TOML or JSON file that `exchange.tuning` names."""

    rows: tuple[TuningRow, ...] = Field(strict=False)  # files have lists

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """The table of a file. Raises ConfigError, which names the file and the mistake."""
        try:
            return cls(**read_config(path, holds="a list `rows:`"))
        except ValidationError as error:
            lines = []
            for item in error.errors():
                table = TuningRow if len(item["loc"]) > 1 else cls
                lines.append(explain(item, tuple(table.model_fields)))
            raise ConfigError(f"{path}: " + "\n".join(lines)) from None

    @model_validator(mode="after")
    def _check(self) -> Tuning:
        seen: set[tuple[int, int, int]] = set()
        for i, row in enumerate(self.rows):
            key = row.hidden_size, row.ranks, row.tokens
            if key in seen:
                raise ValueError(f"`rows[{i}]` must be the only one for these tokens, hidden_size and ranks")
            seen.add(key)
        return self

    def steps(self, hidden_size: int, ranks: int) -> tuple[list[int], list[dict[str, int]]]:
        """Ascending steps of tokens, and one launch more: launches[bisect_left(steps, T)] is for calls of T tokens."""
        rows = [row for row in self.rows if (row.hidden_size, row.ranks) == (hidden_size, ranks)]
        rows.sort(key=lambda row: row.tokens)
        launches = [row.model_dump(include=set(Launch.model_fields)) for row in rows]
        return [row.tokens for row in rows], [*launches, Launch().model_dump()]
