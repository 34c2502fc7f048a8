"""The mail of moves on the CPU: parts into the staging of the others, and words.
epmoe/live/mail.py, moves.py.

PUSHED behind a part stands for every word behind what it announces, as READY behind CANCELLED;
COPIED behind the copy for every word behind what its writer has read, as VERSION behind the last
round with the old tables.
"""

from __future__ import annotations

from protocol.rank import COMBINE, DISPATCH, Look, Rank, Row

PART = "part"
PUSHED = "PUSHED"
COPIED = "COPIED"


class MailRank(Rank):
    """It sends a part to each other rank, and takes theirs; a round is a part. Its nodes: closed
    and pushed.
    """

    def write_round(self, n: int) -> None:
        # Once the staging buffer of the round before is free, push the part, and then its word.
        before = {PART: n - 1}
        posts = self.has("post-releases")
        self.node("pushed", n, before)
        stores = self.issue(PART, self.peers, n, DISPATCH)
        stores |= self.issue(PUSHED, self.peers, n, DISPATCH, last=True, released=posts)
        free = Look(n - 1, self.mine(COPIED, self.peers, n - 1), exact=False) if n > 1 else None
        if not self.has("staging-free"):
            free = None
        self.edge("closed", n - 1, "push of part", ("pushed", n), stores=stores, wait=free)
        # Wait for the words of the others, read their parts, and tell them that they were copied.
        word = Look(n, self.mine(PUSHED, self.peers, n), exact=False)
        part = Look(n, rows=tuple(Row(place) for place in self.mine(PART, self.peers, n)))
        copied = self.issue(COPIED, self.peers, n, COMBINE, released=posts)
        # Without this rule the part may be read before the word.
        if not self.has("look-acquires"):
            self.node("read", n, before)
            self.edge("pushed", n, "read of part", ("read", n), read=part)
            self.edge("read", n, "look for part", ("closed", n), wait=word, stores=copied)
        else:
            self.node("seen", n, before)
            self.edge(
                "pushed", n, "look for part", ("seen", n), wait=word, stores=0 if posts else copied
            )
            self.edge(
                "seen", n, "copy of part", ("closed", n), read=part, stores=copied if posts else 0
            )
        self.node("closed", n, {PART: n})

    def which(self, kind: str, writer: int, n: int) -> tuple[int, ...]:
        return (writer,)
