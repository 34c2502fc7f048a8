"""Versions of a model's weights, which ranks of a trainer leave in a folder, and ranks of a server
map from there.

    rank of a trainer: send ─ draft, renamed once it is whole ─▶ folder
                                                                    │ mapped
                                                                    ▼
                                                                 rank of a server: tick

A version is complete once every rank of the trainer has its file in the folder. A file never
changes. A process that has mapped a file keeps its bytes, even if the trainer removes the file or
dies. So neither side waits for the other.

The name of a file has the group of ranks that has written it. So if a trainer dies with a version
half written, the next trainer never completes this version. A symbolic link in the folder names the
trainer that has begun last. Only this trainer writes and removes files, even if a former trainer
still lives.

Weights of a trainer on GPUs stay in GPU memory, in one piece of memory for each version. The file
then has the shapes of the tensors, from which follows where each lies in the piece. It also has the
name of the socket at which a rank of a server gets the descriptor of the piece. A process that has
mapped a piece keeps its bytes, too. Once the trainer has died, no other process can map it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epmoe.config.placement import is_int
from epmoe.exchange.memory import BUFFER_ALIGNMENT, round_up
from epmoe.exchange.places import Memory, Places
from epmoe.exchange.processors import processor_of
from epmoe.exchange.sockets import MOST_DESCRIPTORS, Handout, fetch_descriptor
from epmoe.group.errors import EPStateError
from epmoe.live.layout import EMPTY
from epmoe.live.shared_words import remove_orphans
from epmoe.live.sleeping import refuse_tensors_without_memory
from epmoe.local.contexts import layers_of, name_without_wrappers
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import local_view
from epmoe.native.arguments import FLOATS, describe
from epmoe.native.build import who_else

# The largest number of a version. It has 13 digits, as many as the name of a file has for it.
MOST_VERSIONS = (1 << 40) - 1
# The name of the symbolic link whose target is the `origin` of the trainer that has begun last.
_TRAINER = ".trainer"
# A rank that cannot write a file leaves a note, named by this prefix and the name of the file.
_FAILED = ".failed-"
# The name of a file: version, group, rank, and the number of ranks of the group.
_FILE = re.compile(r"v(\d{13})\.(\w+\.\d+)\.(\d+)-of-(\d+)")


class _Writer(NamedTuple):
    """The rank of a trainer that has written a file."""

    group: str
    """the name of the trainer's group of ranks; a group that forms anew has a new name"""
    rank: int
    size: int
    """the number of ranks of the group"""


class _File(NamedTuple):
    """A file of the folder: the part of a version that one rank has written."""

    name: str
    """the name of the file"""
    version: int
    writer: _Writer


class Computation(NamedTuple):
    """The options of `GroupedExperts` that say what experts compute, besides their weights.

    A version takes them along: a server whose experts compute something else refuses it.
    """

    interleaved: bool
    limit: float | None
    alpha: float
    up_offset: float


PLAIN = Computation(interleaved=False, limit=None, alpha=1.0, up_offset=0.0)
"""SwiGLU without any option"""


class Experts(NamedTuple):
    """The experts that one rank of the trainer has in one layer."""

    held: list[int]
    """the logical number of each expert, in the order of rows"""
    computes: Computation
    """must be equal on the trainer and on the server"""
    weights: dict[str, Tensor]
    """by name, each [experts, …]; weights that these experts do not have are left out"""


class _Place(NamedTuple):
    """Where the tensor `table[name]` lies in one piece of memory."""

    table: dict[str, Tensor]
    name: str
    begin: int
    """the first byte of the tensor in the piece"""


class _Layout(NamedTuple):
    """The places of several tensors in one piece of memory."""

    places: list[_Place]
    nbytes: int
    """the size of the piece"""


class _Offers(NamedTuple):
    """What hands versions in GPU memory over to other processes."""

    memory: Memory
    """allocates pieces of GPU memory that other processes can map"""
    handout: Handout
    """gives the descriptors of these pieces to processes that ask at its socket"""


class WeightSender:
    """Leaves versions of a model's weights for servers on the same machine. Each rank of the
    trainer has a sender.

    Each rank writes its own experts, as they are when it calls `send`. It waits for no other rank
    and for no server. Each version takes memory for all weights that are sent. The newest `keep`
    whole versions stay, and newer ones that are not whole yet, so that a server that has seen a
    version has time to map it. If the weights are on a GPU, versions lie in memory of this GPU,
    and a server on GPUs of the same machine copies them over NVLink. If the experts have replicas,
    the first replica writes.

    Args:
        model: has `MoELayer`s with `GroupedExperts` that are not quantized. They may be in
            wrappers of torch.
        folder: a folder in memory, such as one in /dev/shm. It is the same for all ranks of the
            trainer and for the server. The sender makes it, for this user only, and whoever ends
            the job removes it. If several trainers are given the same folder, it belongs to the
            one that begins last.
        keep: how many whole versions stay, from 2 to 253. Up to as many newer versions stay, too,
            which some ranks have not sent yet.
        on_host: whether weights on a GPU are copied to the host's memory. This is for a server on
            CPUs, or for a GPU without room for `keep` versions.

    Raises:
        ValueError: `keep` is out of range, or the model has no such layer.
        PermissionError: another user owns the folder, or can write into it.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        on_host: bool = False,
    ) -> None:
        if not is_int(keep) or not 2 <= keep <= MOST_DESCRIPTORS:
            raise ValueError(
                f"`keep` must be an integer from 2 to {MOST_DESCRIPTORS}, got {keep!r}"
            )
        self._layers = layers_to_hand_over(model)
        self._folder = own_folder(folder)
        self._keep = keep
        # Files that other ranks could not write, for which this rank has raised OSError already.
        self._raised_for = set[str]()
        self._ep = next(iter(self._layers.values())).ep
        # Replicas have the same experts, so only the first replica writes. All dimensions of the
        # mesh but the last are those of replicas.
        mesh = self._ep.mesh
        self._writes = mesh is None or not any(mesh.get_coordinate()[:-1])
        self._offers: _Offers | None = None
        if self._writes:
            self._take_folder()
            memory = None if on_host else shared_memory(self._ep.device)
            if memory is not None:
                self._offers = _Offers(memory, Handout())

    def _take_folder(self) -> None:
        """Make the link of the folder name this trainer. A former trainer that still lives stops
        writing when it sees this.
        """
        # `replace` puts the new link in place of the old one in one step.
        link = self._folder / f"{_TRAINER}.{secrets.token_hex(8)}"
        link.symlink_to(self._ep.origin)
        link.replace(self._folder / _TRAINER)

    def send(self, version: int, dense: Mapping[str, Tensor] | None = None) -> None:
        """Leave this rank's part of a version. All ranks of the trainer send the same versions,
        whose numbers grow.

        It waits for no other rank. On a GPU it waits for its own copy, and for what this GPU has to
        do before that. If another rank could not send a version, the next call here raises OSError,
        once, and sends nothing. The other rank may then send its part again, or all ranks send a
        larger version.

        Args:
            version: the number of the version, above all that this rank or a former trainer has
                sent.
            dense: weights that are no experts: plain tensors by any name, each given by one rank.
                Parts of names that wrappers of torch have put in are removed (torch.compile, DDP,
                FSDP, `checkpoint_wrapper`). The server's callback gets the weights of all ranks.

        Raises:
            TypeError: a value of `dense` is no plain tensor, such as a DTensor.
            ValueError: `version` is not above earlier ones, or a name is there twice.
            OSError: the memory is full here, or was full on another rank in an earlier call.
            MemoryError: the memory of the GPU is full.
            EPStateError: another trainer has begun, or the memory of weights is gone, as
                `SleepingWeights.offload` leaves it. After any of these errors nothing was sent.
        """
        dense_by_name = _plain_tensors({} if dense is None else dense)
        if not self._writes:
            if dense_by_name:
                raise ValueError(
                    "`dense` must come from a rank of the first replica of the experts, which "
                    "writes"
                )
            return
        experts_by_layer = {name: _experts_of(layer) for name, layer in self._layers.items()}
        # All tensors of the version, as tables by name: those of each layer, and the dense ones.
        tables = [experts.weights for experts in experts_by_layer.values()]
        tables.append(dense_by_name)
        writer = _Writer(
            group=f"{self._ep.origin}.{self._ep.generation}",
            rank=self._ep.rank,
            size=self._ep.size,
        )
        # Refuse what cannot be sent, before anything is written.
        self._remove_drafts_of_others(writer.group)
        files = self._files_there()
        _check_number(version, files, writer)
        _check_has_weights(tables)
        for table in tables:
            refuse_tensors_without_memory(table.items())
        self._raise_failures_of_others(writer.group)
        # Write this rank's part.
        path = self._folder / _name_of(version, writer)
        note = self._folder / f"{_FAILED}{path.name}"
        parts = {name: _plain_tuple(experts) for name, experts in experts_by_layer.items()}
        try:
            self._write(path, parts, dense_by_name, tables, files)
        except EPStateError:
            # Another trainer has the folder, so leave no note in it.
            raise
        except BaseException as error:
            # Without this part the version is never whole: let the other ranks know.
            must_tell_others = self._ep.size > 1 and not path.exists()
            if must_tell_others:
                _leave_note(note, error)
            raise
        # An earlier attempt to send this part may have left a note.
        note.unlink(missing_ok=True)
        self._remove_old()

    def _files_there(self) -> list[_File]:
        """The files of versions that are in the folder now."""
        return list(_files(os.listdir(self._folder)))

    def _remove_drafts_of_others(self, group: str) -> None:
        """Remove the drafts of all other groups, whose ranks are dead or may not write any more.

        Raises EPStateError if another trainer has begun.
        """
        # List the drafts first, then check the trainer. If the check passes, no newer trainer had
        # begun when the list was made, so the list has no draft of a newer trainer.
        drafts = [*self._folder.glob(".v*")]
        self._check_trainer()
        for draft in drafts:
            is_of_this_group = f".{group}." in draft.name
            if not is_of_this_group:
                draft.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Remove files of versions that nobody needs any more, and notes about older versions."""
        # List the folder again: if this rank's part was the last, the new version is whole now.
        files = self._files_there()
        versions_to_keep = _versions_to_keep(files, self._keep)
        # Also remove the parts of other ranks. Nobody can use a version that lacks one part.
        for file in files:
            if file.version not in versions_to_keep:
                (self._folder / file.name).unlink(missing_ok=True)
        for note in self._folder.glob(f"{_FAILED}*"):
            if _parse_file_name(note).version < min(versions_to_keep):
                note.unlink(missing_ok=True)

    def _write(
        self,
        path: Path,
        parts: dict[str, tuple[Any, ...]],
        dense: dict[str, Tensor],
        tables: list[dict[str, Tensor]],
        files: list[_File],
    ) -> None:
        """Write this rank's file of a version.

        `tables` has the same dictionaries of tensors as `parts` and `dense`. Tensors in them are
        replaced by copies. `files` are those of the folder before this version. Raises OSError or
        MemoryError if there is no room, and EPStateError if another trainer has begun.
        """
        version = _parse_file_name(path).version
        # Tensors on a GPU move into a piece of GPU memory, and leave meta tensors here.
        socket = None
        if self._offers is not None:
            socket = self._offer(self._offers, version, tables, files)
        # All other tensors go into the file.
        for table in tables:
            for name, value in table.items():
                if not value.is_meta:
                    table[name] = _plain(value)
        # Write a draft, then rename it, so that nobody sees a part of a file.
        draft = path.with_name(f".{path.name}")
        try:
            torch.save({"experts": parts, "dense": dense, "socket": socket}, draft)
            self._check_trainer()
            draft.replace(path)
        except BaseException as error:
            draft.unlink(missing_ok=True)
            # torch raises a plain RuntimeError where it cannot write a file.
            if type(error) is RuntimeError:
                what = (
                    f"version {version} does not fit into {self._folder}, beside up to "
                    f"{self._keep} others"
                )
                raise OSError(f"{what}: {error}") from error
            raise

    def _raise_failures_of_others(self, group: str) -> None:
        """Raise OSError if another rank of this group has left a note that it could not send a
        version. Each note is raised once.
        """
        for note in sorted(self._folder.glob(f"{_FAILED}*")):
            failed = _parse_file_name(note)
            # A note of another group is that of a trainer that has gone.
            if failed.writer.group != group:
                note.unlink(missing_ok=True)
                continue
            failed_rank = failed.writer.rank
            if failed_rank == self._ep.rank or failed.name in self._raised_for:
                continue
            self._raised_for.add(failed.name)
            # If the rank had no memory for the text either, the note is empty.
            why = ""
            with suppress(OSError):
                why = note.read_text()
            what = f"rank {failed_rank} could not send version {failed.version}"
            raise OSError(f"{what}: {why or 'its memory is full'}; nothing was sent now")

    def _check_trainer(self) -> None:
        """Raise EPStateError if another trainer has taken the folder."""
        if os.readlink(self._folder / _TRAINER) != self._ep.origin:
            remedy = (
                "each needs a folder of its own, and replicas of experts give ExpertParallel their "
                "mesh"
            )
            raise EPStateError(f"another trainer has begun to send into {self._folder}: {remedy}")

    def _offer(
        self, offers: _Offers, version: int, tables: list[dict[str, Tensor]], files: list[_File]
    ) -> str:
        """Copy the tensors that are on the GPU into a new piece of its memory, for other processes.

        In the tables these tensors are replaced by meta tensors of the same shape and dtype, so the
        file gets no weights. `files` are those in the folder before this version. Returns the name
        of the socket at which servers get the descriptor of the piece.
        """
        memory, handout = offers
        layout = _lay_out(tables, memory.device)
        # Free old pieces before the new one takes room. With the new version there are `keep`.
        handout.drop_others(_versions_to_keep(files, self._keep - 1))
        # Versions that never became whole may be many: leave room for one more descriptor.
        handout.drop(MOST_DESCRIPTORS - 1)
        piece = Places(memory, count=1, nbytes=layout.nbytes)
        try:
            descriptor = piece.create(layout.nbytes)
        except MemoryError as error:
            why = (
                f"version {version} needs {layout.nbytes:,} bytes of GPU memory beside what torch "
                "holds: take a smaller"
            )
            raise MemoryError(f"{why} `keep`, torch.cuda.empty_cache(), or on_host=True") from error
        handout.keep(version, descriptor)
        # Copy one tensor after another. The file gets its shape and dtype only.
        region = piece.map(place=0, descriptor=descriptor, nbytes=layout.nbytes)
        for table, name, begin in layout.places:
            value = table[name]
            with torch.no_grad():
                _view(region, begin, value).copy_(value)
            table[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        # This process need not map the memory any more: the descriptor in `handout` keeps it.
        piece.unmap()
        return handout.name


class Version(NamedTuple):
    """A complete version, whose tensors lie in mapped memory of the trainer."""

    number: int
    trainer: str
    """the name of the trainer's group of ranks"""
    experts: dict[str, list[Experts]]
    """by layer: the experts that each rank of the trainer has sent"""
    dense: dict[str, Tensor]
    """the weights that are no experts, by name"""


def newest_version(folder: Path) -> int:
    """The number of the newest complete version; −1 if there is none, or the folder has gone."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return -1
    return max((parts[0].version for parts in _complete(_files(names))), default=-1)


def what_is_there(folder: Path) -> str:
    """Say for an error which version is the newest complete one, and which ranks of the trainer
    have sent no part of a newer version.
    """
    newest = newest_version(folder)
    said = f"the newest whole version is {newest}" if newest >= 0 else "no version is whole"
    names = os.listdir(folder) if folder.exists() else []
    parts = [file for file in _files(names) if file.version > newest]
    if not parts:
        return said
    # Of several incomplete versions, look at the newest.
    last = max(parts, key=lambda file: file.version)
    sent = {file.writer.rank for file in parts if _are_of_one_version(file, last)}
    missing = [rank for rank in range(last.writer.size) if rank not in sent]
    return f"{said}; of version {last.version} rank(s) {missing} of the trainer have sent no part"


def map_version(folder: Path, number: int, memory: Memory | None) -> Version:
    """Map version `number` into this process.

    `memory` maps tensors that lie in GPU memory; None on CPUs. Raises FileNotFoundError if the
    trainer has removed the version, or has died with a version in GPU memory. Raises ValueError if
    the version lies in GPU memory and `memory` is None, if two trainers have sent this version, or
    if two ranks have sent the same dense weight.
    """
    found = _complete(_files(path.name for path in folder.glob(f"v{number:013}.*")))
    if len(found) > 1:
        raise ValueError(
            f"several trainers have sent version {number} into {folder}: each needs a folder of "
            "its own"
        )
    if not found:
        raise FileNotFoundError(f"version {number} is not complete any more")
    files = sorted(found[0])
    version = Version(number, files[0].writer.group, experts={}, dense={})
    for file in files:
        # torch opens a path twice, and the trainer may remove the file in between. So open it
        # here, and give torch a path to the open file.
        with (folder / file.name).open("rb") as opened:
            path = f"/proc/self/fd/{opened.fileno()}"
            part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if part["socket"] is not None:
            _map_offer(part, number, memory)
        sent_twice = version.dense.keys() & part["dense"].keys()
        if sent_twice:
            raise ValueError(
                f"`dense[{min(sent_twice)!r}]` of version {number} comes from several ranks of the "
                "trainer: one must send it"
            )
        version.dense.update(part["dense"])
        for name, (held, computation, weights) in part["experts"].items():
            experts = Experts(held, Computation(*computation), weights)
            version.experts.setdefault(name, []).append(experts)
    return version


def check_all_experts(version: Version, name: str, num_experts: int) -> None:
    """Raise ValueError unless the version has experts 0 to `num_experts` − 1 of layer `name`."""
    sent = {expert for part in version.experts[name] for expert in part.held} - {EMPTY}
    if sent != {*range(num_experts)}:
        raise ValueError(
            f"version {version.number} must have {num_experts} experts of {name!r}, got {len(sent)}"
        )


def _map_offer(part: dict[str, Any], number: int, memory: Memory | None) -> None:
    """Map the GPU memory of one rank of the trainer, and replace the meta tensors of its part by
    tensors in this memory.

    `part` is the contents of the file, `number` the version. Raises FileNotFoundError if the
    trainer does not have the version any more, and ValueError if `memory` is None.
    """
    if memory is None:
        raise ValueError(
            f"version {number} lies in GPU memory: WeightSender(…, on_host=True) has it on the host"
        )
    # The tables in the order in which `_offer` has laid them out: so the places are the same.
    tables = [weights for _, _, weights in part["experts"].values()]
    tables.append(part["dense"])
    layout = _lay_out(tables, torch.device("meta"))
    try:
        descriptor = fetch_descriptor(
            part["socket"], number, f"version {number} is not there any more"
        )
    except (RuntimeError, TimeoutError) as error:
        # If the trainer's process does not answer, it counts as gone.
        raise FileNotFoundError(str(error)) from error
    try:
        piece = Places(memory, count=1, nbytes=layout.nbytes)
        region = piece.map(place=0, descriptor=descriptor, nbytes=layout.nbytes)
    finally:
        # The mapping needs no descriptor any more.
        os.close(descriptor)
    for table, name, begin in layout.places:
        table[name] = _view(region, begin, table[name])


def _lay_out(tables: list[dict[str, Tensor]], device: torch.device) -> _Layout:
    """Give each tensor that is on `device` its place in one piece of memory.

    The places follow the order of the tables. So the sender, whose tensors are on a GPU, and the
    server, which has meta tensors in their place, find the same layout.
    """
    places = []
    end = 0
    for table in tables:
        for name, value in table.items():
            if value.device == device:
                places.append(_Place(table, name, end))
                end = round_up(end + value.numel() * value.itemsize, BUFFER_ALIGNMENT)
    # A piece of memory has at least one byte.
    return _Layout(places, nbytes=max(end, 1))


def _view(region: Tensor, begin: int, value: Tensor) -> Tensor:
    """View the bytes of `region` from `begin` on as a tensor of the shape and dtype of `value`."""
    nbytes = value.numel() * value.itemsize
    return region[begin : begin + nbytes].view(value.dtype).view(value.shape)


def shared_memory(device: torch.device) -> Memory | None:
    """Memory of a GPU that other processes can map. None on CPUs: there, other processes map the
    files of a version.
    """
    return processor_of(device).shared_memory()


def _leave_note(note: Path, error: BaseException) -> None:
    """Leave a note of a failure for the other ranks. If there is no room for its text, the note
    is an empty file, whose name says which part is missing.
    """
    with suppress(OSError):
        note.touch()
        note.write_text(f"{type(error).__name__}: {error}")


def _parse_file_name(path: Path) -> _File:
    """What the name of a part says, or the name of a note about a part."""
    return next(_files([path.name.removeprefix(_FAILED)]))


def _name_of(version: int, writer: _Writer) -> str:
    """The name of the file for a writer's part of a version, in the form of `_FILE`."""
    return f"v{version:013}.{writer.group}.{writer.rank}-of-{writer.size}"


def _files(names: Iterable[str]) -> Iterator[_File]:
    """Parse the names of files of versions. Other names of the folder are skipped."""
    for name in names:
        match = _FILE.fullmatch(name)
        if match:
            version, group, rank, size = match.groups()
            writer = _Writer(group=group, rank=int(rank), size=int(size))
            yield _File(name, version=int(version), writer=writer)


def _are_of_one_version(file: _File, other: _File) -> bool:
    """Whether two files are parts of the same version, sent by the same group."""
    same_group = file.writer.group == other.writer.group and file.writer.size == other.writer.size
    return same_group and file.version == other.version


def _complete(files: Iterable[_File]) -> list[list[_File]]:
    """The files of each complete version, a version of which all ranks of one group have written
    their part.
    """
    versions = dict[tuple[int, str, int], list[_File]]()
    for file in files:
        key = (file.version, file.writer.group, file.writer.size)
        versions.setdefault(key, []).append(file)
    return [parts for parts in versions.values() if len(parts) == parts[0].writer.size]


def _check_number(version: int, files: list[_File], writer: _Writer) -> None:
    """Raise ValueError unless `version` is above all versions that this rank has sent, and above
    all whole versions of former groups.

    A version that the other ranks of this group have sent, and this rank has not, may still come.
    """
    earlier = [file.version for file in files if file.writer == writer]
    for parts in _complete(files):
        if parts[0].writer.group != writer.group:
            earlier.append(parts[0].version)
    newest = max(earlier, default=-1)
    if not is_int(version) or not newest < version <= MOST_VERSIONS:
        raise ValueError(
            f"`version` must be an integer above {newest}, the last that was sent, got {version!r}"
        )


def _check_has_weights(tables: list[dict[str, Tensor]]) -> None:
    """Raise ValueError if a tensor is on the meta device, and so has no values to send."""
    for table in tables:
        for name, value in table.items():
            if value.is_meta:
                raise ValueError(f"{name!r} is a meta tensor, which has no weights to send")


def _versions_to_keep(files: list[_File], keep: int) -> set[int]:
    """The `keep` newest whole versions, and up to `keep` newer ones that are not whole yet.

    A version below a whole one never becomes whole: every rank has sent the whole version, and
    each rank sends growing numbers. So incomplete older versions are not kept.
    """
    whole = {parts[0].version for parts in _complete(files)}
    newest = max(whole, default=-1)
    unfinished = {file.version for file in files if file.version > newest}
    return {*sorted(whole)[-keep:], *sorted(unfinished)[-keep:]}


def layers_to_hand_over(model: nn.Module) -> dict[str, Any]:
    """The `MoELayer`s of a model, by name.

    Raises ValueError if the model has none, or a layer has other experts than `GroupedExperts`.
    """
    layers = layers_of(model)
    with_other_experts = []
    for name, layer in layers.items():
        if not isinstance(layer.experts, GroupedExperts):
            with_other_experts.append(name)
    if layers and not with_other_experts:
        return layers
    problem = with_other_experts[0] if with_other_experts else "no MoELayer"
    raise ValueError(f"`model` must have MoELayers with GroupedExperts, got {problem!r}")


def own_folder(folder: str | os.PathLike[str]) -> Path:
    """Make the folder if it is not there, and remove files that killed servers have left in it.

    Raises PermissionError if other users could write into the folder: a file of theirs would be
    taken for weights.
    """
    path = Path(folder).absolute()
    path.mkdir(0o700, parents=True, exist_ok=True)
    who = who_else(path)
    if who:
        raise PermissionError(f"{path} {who}, who could put weights there: take another folder")
    remove_orphans(path)
    return path


def computes(experts: GroupedExperts) -> Computation:
    """The options that say what these experts compute, besides their weights."""
    return Computation(experts.interleaved, experts.limit, experts.alpha, experts.up_offset)


def _plain_tuple(experts: Experts) -> tuple[Any, ...]:
    """The fields as plain values, for a file: `torch.load(…, weights_only=True)` refuses classes
    that it does not know, such as `Experts`.
    """
    return experts.held, tuple(experts.computes), experts.weights


def _experts_of(layer: Any) -> Experts:
    """The experts that this rank has in a layer, to be sent.

    Raises ValueError if they are quantized, or sharded so that a rank has only parts of experts.
    """
    experts = layer.experts
    if experts.dtype not in FLOATS or experts.is_quantized:
        raise ValueError(
            f"experts of a trainer must be fp32, fp16 or bf16, got {describe(experts.w_down)}"
        )
    weights = {name: local_view(value.detach()) for name, value in experts.named_parameters()}
    # Each weight must have one row for each expert. If experts are sharded, rows are missing.
    held = layer.ep.logical_experts(layer.tag)
    for name, value in weights.items():
        if len(value) != len(held):
            remedy = (
                "give ExpertParallel the mesh of its replicas, and do not shard experts over them"
            )
            raise ValueError(
                f"`experts.{name}` must have a row for each of {len(held)} experts, to be sent: "
                f"{remedy}"
            )
    return Experts(held, computes(experts), weights)


def _plain_tensors(dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check dense weights, and return them by their names without the parts that wrappers of torch
    put in.

    Raises TypeError if a value is no plain tensor, and ValueError if two names are the same
    without these parts.
    """
    for name, value in dense.items():
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not is_plain or not isinstance(name, str):
            remedy = "such as `full_tensor()` of a DTensor"
            raise TypeError(
                f"`dense[{name!r}]` must be a plain tensor, {remedy}, got {describe(value)}"
            )
    by_plain_name = {name_without_wrappers(name): value.detach() for name, value in dense.items()}
    if len(by_plain_name) < len(dense):
        names = Counter(map(name_without_wrappers, dense))
        raise ValueError(f"`dense` must have each weight once, got {names.most_common(1)[0][0]!r}")
    return by_plain_name


def _plain(value: Tensor) -> Tensor:
    """A contiguous tensor on the CPU with the values of `value`, in a storage of its own size.

    `torch.save` writes the whole storage of a tensor, so a part of a larger one is copied first.
    """
    value = value.detach().cpu().contiguous()
    is_part = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if is_part else value
