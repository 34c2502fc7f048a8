"""Descriptors that a process gives to others: at a socket that outlives a fork, and a shortage of
files.
"""

from __future__ import annotations

import errno
import json
import os
import socket

import pytest

from epmoe.exchange.sockets import MOST_DESCRIPTORS, Handout, fetch_descriptor


def handout_of(number: int) -> Handout:
    handout = Handout()
    handout.keep(number, os.open(os.devnull, os.O_RDONLY))
    return handout


def test_a_fork_that_drops_it_leaves_the_socket_open():
    handout = handout_of(1)
    child = os.fork()
    if not child:
        try:
            del handout
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(fetch_descriptor(handout.name, 1, "version 1 is not there"))


def test_as_many_as_a_message_takes():
    handout = handout_of(0)
    for number in range(1, MOST_DESCRIPTORS):
        handout.keep(number, os.open(os.devnull, os.O_RDONLY))
    os.close(fetch_descriptor(handout.name, MOST_DESCRIPTORS - 1, "the last version is not there"))


def test_a_shortage_of_files_passes(monkeypatch):
    accept = socket.socket.accept
    short = [True]

    def accepts(listener: socket.socket) -> object:
        if short:
            short.clear()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    # The first accept finds no descriptor free.
    monkeypatch.setattr(socket.socket, "accept", accepts)
    handout = handout_of(1)
    os.close(fetch_descriptor(handout.name, 1, "version 1 is not there"))
    assert not short


def test_a_forked_child_does_not_outlive_it():
    """Whoever asks for what a dead process gave hears so at once, though its child lives; and the
    child keeps no descriptor.
    """
    told, tells = os.pipe()
    stays, ends = os.pipe()
    # An owner, which has a child and ends.
    owner = os.fork()
    if not owner:
        handout = handout_of(1)
        kept = handout._kept[1]
        child = os.fork()
        if not child:
            os.close(ends)
            os.write(tells, json.dumps([handout.name, _is_open(kept)]).encode())
            os.read(stays, 1)
            os._exit(0)
        os._exit(0)
    os.waitpid(owner, 0)
    # Who asks hears at once that nobody is there.
    name, is_open = json.loads(os.read(told, 1000))
    try:
        with pytest.raises(RuntimeError, match="version 1 is not there .*has closed it"):
            fetch_descriptor(name, 1, "version 1 is not there")  # not a TimeoutError, much later
        assert not is_open
    finally:
        os.close(ends)
        for each in (told, tells, stays):
            os.close(each)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
