"""What the layers of a host framework share is released, wherever a signal handler raises."""

from __future__ import annotations

import itertools

import torch
from helpers import interrupted_at

from epmoe.integrations import session
from epmoe.integrations.session import Session

FILES = {__file__, session.__file__}


class Entry:
    is_closed = False

    def poll(self) -> None:
        """Nothing."""

    def close(self) -> None:
        self.is_closed = True


def made(_: int) -> Entry:
    return Entry()


def test_a_close_that_was_interrupted_goes_on() -> None:
    for step in itertools.count():
        shared: Session[Entry] = Session()
        entries = [shared.share(shape, None, torch.device("cpu"), made) for shape in range(3)]
        with interrupted_at(step, FILES) as found:
            shared.close()
        shared.close()
        assert all(entry.is_closed for entry in entries)
        assert not shared.entries()
        if not found.came:
            break
    assert step > len(entries)


def test_a_release_that_was_interrupted_is_done_again() -> None:
    for step in itertools.count():
        shared: Session[Entry] = Session()
        first, second = (shared.share(n, None, torch.device("cpu"), made) for n in range(2))
        with interrupted_at(step, FILES) as found:
            shared.release(first)
        shared.release(first)
        assert first.is_closed and not second.is_closed
        assert shared.entries() == (second,)
        if not found.came:
            break
