"""Versions of a model's weights, which ranks of a trainer leave in a folder, and ranks of a server
map from there.

    rank of a trainer: send ─ draft, renamed once it is whole ─▶ folder
                                                                    │ mapped
                                                                    ▼
                                                                 rank of a server: tick

A version is complete once every rank of the trainer has its file there. A file never changes, and
whoever has mapped one keeps its bytes, also once the trainer has removed it or has died. So neither
side waits for the other. Files name the group that has written them: what a trainer that has died
leaves is never completed by the next one. A link names the trainer that has begun last. It alone
writes and removes files, also where a former one still lives.

Weights of a trainer on GPUs stay in GPU memory, one piece for each version. The file then says
where they lie in it, and at which socket a rank of a server gets its descriptor. Who has mapped it
keeps its bytes, too; nobody else gets it once the trainer has died.
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
from epmoe.local.contexts import layers_of, name_without_wrappers
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import local_view
from epmoe.native.arguments import FLOATS, describe
from epmoe.native.build import who_else

MOST_VERSIONS = (1 << 40) - 1
_TRAINER = ".trainer"
# Stands before the name of a file that a rank could not write.
_FAILED = ".failed-"
_FILE = re.compile(r"v(\d{13})\.(\w+\.\d+)\.(\d+)-of-(\d+)")


class _Writer(NamedTuple):
    """A rank of a group of a trainer."""

    group: str
    rank: int
    size: int
    """ranks of the group"""


class _File(NamedTuple):
    """The part of a version that one rank has written."""

    name: str
    version: int
    writer: _Writer


class Computation(NamedTuple):
    """How experts compute, besides their weights; see `GroupedExperts`."""

    interleaved: bool
    limit: float | None
    alpha: float
    up_offset: float


PLAIN = Computation(interleaved=False, limit=None, alpha=1.0, up_offset=0.0)
"""SwiGLU without any option"""


class Experts(NamedTuple):
    """A rank's experts of a layer."""

    held: list[int]
    """their logical numbers"""
    computes: Computation
    """must be equal on both sides"""
    weights: dict[str, Tensor]
    """[e, …] by name, without those that are None"""


class _Place(NamedTuple):
    """Where a tensor of a table lies in one piece of memory."""

    table: dict[str, Tensor]
    name: str
    begin: int
    """its first byte"""


class _Layout(NamedTuple):
    """Tensors in one piece of memory."""

    places: list[_Place]
    nbytes: int


class _Offers(NamedTuple):
    """What hands versions in GPU memory over to other processes."""

    memory: Memory
    handout: Handout


class WeightSender:
    """Leaves versions of a model's weights for servers on the same machine. Each rank of the
    trainer has one.

    A rank writes its own experts, as they are when it calls `send`, and waits for no other rank and
    for no server. Each version takes memory for all weights that are sent. The newest `keep` whole
    versions stay, and what is newer, so that a server that has seen one has time to map it. It is
    memory of the GPU where the weights are on one, from which a server on GPUs of the same machine
    copies them by NVLink. Of replicas of the experts the first one writes.

    Args:
        model: whose layers are `MoELayer`s with `GroupedExperts` that are not quantized, in
            wrappers of torch or not.
        folder: in memory, such as one in /dev/shm; the same for all ranks of the trainer, and for
            the server. It is made, for this user only. Whoever ends the job removes it. The trainer
            that begins last has it.
        keep: whole versions that stay, from 2 to 253. As many newer ones that some ranks have not
            sent yet stay, too.
        on_host: whether weights on a GPU are copied to the host's memory, for a server on CPUs, or
            where the GPU has no room for `keep` versions.

    Raises:
        ValueError: `keep` is less or more, or the model has no such layer.
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
        # Names of what other ranks could not send, and this one has said.
        self._told = set[str]()
        self._ep = next(iter(self._layers.values())).ep
        # Replicas have the same experts: the first one writes.
        mesh = self._ep.mesh
        self._writes = mesh is None or not any(mesh.get_coordinate()[:-1])
        self._offers: _Offers | None = None
        if self._writes:
            self._take_folder()
            memory = None if on_host else shared_memory(self._ep.device)
            if memory is not None:
                self._offers = _Offers(memory, Handout())

    def _take_folder(self) -> None:
        """Become the trainer that writes here: a former one stops when it sees the link."""
        link = self._folder / f"{_TRAINER}.{secrets.token_hex(8)}"
        link.symlink_to(self._ep.origin)
        link.replace(self._folder / _TRAINER)

    def send(self, version: int, dense: Mapping[str, Tensor] | None = None) -> None:
        """Leave this rank's part of a version, a number that grows. All ranks of the trainer send
        the same versions.

        It waits for no other rank, and on a GPU for what the GPU has to do. Where another rank
        could not send a version, the next call here says so, once, and sends nothing. That rank may
        then send its part again, or all ranks a larger version.

        Args:
            version: the number, above all that this rank or a trainer before it has sent.
            dense: other weights, plain tensors by any name, each given by one rank. Parts of names
                go that wrappers of torch have put there (torch.compile, DDP, FSDP,
                `checkpoint_wrapper`). The server's callback gets the weights of all ranks.

        Raises:
            TypeError: a value of `dense` is no plain tensor, such as a DTensor.
            ValueError: `version` is not above the others, or a name is there twice.
            OSError: the memory is full, here or earlier on another rank.
            MemoryError: that of the GPU is full.
            EPStateError: another trainer has begun. Nothing was sent then, nor in other cases.
        """
        plain = _plain_tensors({} if dense is None else dense)
        if not self._writes:
            if plain:
                raise ValueError(
                    "`dense` must come from a rank of the first replica of the experts, which "
                    "writes"
                )
            return
        experts = {name: _experts_of(layer) for name, layer in self._layers.items()}
        tables = [*(each.weights for each in experts.values()), plain]
        writer = _Writer(f"{self._ep.origin}.{self._ep.generation}", self._ep.rank, self._ep.size)
        # Refuse what cannot be sent, before anything is written.
        self._remove_drafts_of_others(writer.group)
        files = self._files_there()
        _check_number(version, files, writer)
        _check_has_weights(tables)
        self._hear_of_failures(writer.group)
        # Write the part. The note of a failure goes once it is there.
        whole = self._folder / _name_of(version, writer)
        note = self._folder / f"{_FAILED}{whole.name}"
        parts = {name: _plain_tuple(each) for name, each in experts.items()}
        try:
            self._write(whole, parts, plain, tables, files)
        except EPStateError:
            # Another trainer has the folder.
            raise
        except BaseException as error:
            others_wait = self._ep.size > 1 and not whole.exists()
            if others_wait:
                _leave_note(note, error)
            raise
        note.unlink(missing_ok=True)
        self._remove_old()

    def _files_there(self) -> list[_File]:
        return list(_files(os.listdir(self._folder)))

    def _remove_drafts_of_others(self, group: str) -> None:
        """Remove drafts of dead ranks. Raises EPStateError if another trainer has begun."""
        # List them before the check: then no draft belongs to another trainer that lives.
        drafts = [*self._folder.glob(".v*")]
        self._check_trainer()
        for draft in drafts:
            is_ours = f".{group}." in draft.name
            if not is_ours:
                draft.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Remove versions that nobody needs any more, and notes about them."""
        # Look again: the rank that writes its part last sees a whole version.
        files = self._files_there()
        stay = _versions_to_keep(files, self._keep)
        # Parts of any rank go: without one of them the version is not whole for anybody.
        for file in files:
            if file.version not in stay:
                (self._folder / file.name).unlink(missing_ok=True)
        for failed in self._folder.glob(f"{_FAILED}*"):
            if _parsed(failed).version < min(stay):
                failed.unlink(missing_ok=True)

    def _write(
        self,
        whole: Path,
        parts: dict[str, tuple[Any, ...]],
        dense: dict[str, Tensor],
        tables: list[dict[str, Tensor]],
        files: list[_File],
    ) -> None:
        """Write this rank's file of a version. Tensors in the tables move to new memory."""
        version = _parsed(whole).version
        # Tensors on a GPU move into a piece of GPU memory, and leave meta tensors here.
        socket = None
        if self._offers is not None:
            socket = self._offer(self._offers, version, tables, files)
        # All others go into the file.
        for table in tables:
            for name, value in table.items():
                if not value.is_meta:
                    table[name] = _plain(value)
        # Draft and rename, so that nobody sees a part of a file.
        draft = whole.with_name(f".{whole.name}")
        try:
            torch.save({"experts": parts, "dense": dense, "socket": socket}, draft)
            self._check_trainer()
            draft.replace(whole)
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

    def _hear_of_failures(self, group: str) -> None:
        """Raise OSError, once for each version of this group that another rank could not send."""
        for note in sorted(self._folder.glob(f"{_FAILED}*")):
            failed = _parsed(note)
            # A trainer that has gone has left it.
            if failed.writer.group != group:
                note.unlink(missing_ok=True)
                continue
            failed_rank = failed.writer.rank
            if failed_rank == self._ep.rank or failed.name in self._told:
                continue
            self._told.add(failed.name)
            # The note is empty where the rank had no memory for its text either.
            why = ""
            with suppress(OSError):
                why = note.read_text()
            what = f"rank {failed_rank} could not send version {failed.version}"
            raise OSError(f"{what}: {why or 'its memory is full'}; nothing was sent now")

    def _check_trainer(self) -> None:
        if os.readlink(self._folder / _TRAINER) != self._ep.origin:
            remedy = (
                "each needs a folder of its own, and replicas of experts give ExpertParallel their "
                "mesh"
            )
            raise EPStateError(f"another trainer has begun to send into {self._folder}: {remedy}")

    def _offer(
        self, offers: _Offers, version: int, tables: list[dict[str, Tensor]], files: list[_File]
    ) -> str:
        """Copy the tensors on the GPU into a new piece of its memory. In the tables they become
        meta tensors.

        `files` are those in the folder before this version. Returns the name of the socket.
        """
        memory, handout = offers
        layout = _laid_out(tables, memory.device)
        # Old pieces go before the new one takes room.
        handout.drop_others(_versions_to_keep(files, self._keep - 1))
        handout.drop(MOST_DESCRIPTORS - 1)
        piece = Places(memory, 1, layout.nbytes)
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
        region = piece.map(0, descriptor, layout.nbytes)
        for table, name, begin in layout.places:
            value = table[name]
            with torch.no_grad():
                _view(region, begin, value).copy_(value)
            table[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        # The descriptor keeps the memory, which this process need not map any more.
        piece.unmap()
        return handout.name


class Version(NamedTuple):
    """The parts of a complete version, in mapped memory."""

    number: int
    trainer: str
    """its group of ranks"""
    experts: dict[str, list[Experts]]
    """by layer, of each rank of the trainer"""
    dense: dict[str, Tensor]


def newest_version(folder: Path) -> int:
    """The newest complete version; −1 if there is none, or no folder any more."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return -1
    return max((parts[0].version for parts in _complete(_files(names))), default=-1)


def what_is_there(folder: Path) -> str:
    """Text that names the newest complete version, and the ranks that a newer version lacks."""
    newest = newest_version(folder)
    said = f"the newest whole version is {newest}" if newest >= 0 else "no version is whole"
    names = os.listdir(folder) if folder.exists() else []
    parts = [file for file in _files(names) if file.version > newest]
    if not parts:
        return said
    # The newest part tells the version and the group that have not come whole.
    last = max(parts, key=lambda file: file.version)
    sent = {file.writer.rank for file in parts if _are_of_one_version(file, last)}
    missing = [rank for rank in range(last.writer.size) if rank not in sent]
    return f"{said}; of version {last.version} rank(s) {missing} of the trainer have sent no part"


def map_version(folder: Path, number: int, memory: Memory | None) -> Version:
    """Map a version into this process. `memory` maps tensors that lie in GPU memory.

    Raises FileNotFoundError if the trainer has removed the version or has died. Raises ValueError
    if it lies on GPUs and this rank has none, if two trainers have sent it, or two ranks the same
    dense weight.
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
        # Open it once: torch opens a path twice, and the file may go in between.
        with (folder / file.name).open("rb") as opened:
            path = f"/proc/self/fd/{opened.fileno()}"
            part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if part["socket"] is not None:
            _map_offer(part, number, memory)
        twice = version.dense.keys() & part["dense"].keys()
        if twice:
            raise ValueError(
                f"`dense[{min(twice)!r}]` of version {number} comes from several ranks of the "
                "trainer: one must send it"
            )
        version.dense.update(part["dense"])
        for name, (held, computation, weights) in part["experts"].items():
            experts = Experts(held, Computation(*computation), weights)
            version.experts.setdefault(name, []).append(experts)
    return version


def check_all_experts(version: Version, name: str, num_experts: int) -> None:
    """Raise ValueError if a layer of the version lacks an expert."""
    sent = {expert for part in version.experts[name] for expert in part.held} - {EMPTY}
    if sent != {*range(num_experts)}:
        raise ValueError(
            f"version {version.number} must have {num_experts} experts of {name!r}, got {len(sent)}"
        )


def _map_offer(part: dict[str, Any], number: int, memory: Memory | None) -> None:
    """Replace the meta tensors of a part by tensors that map the trainer's GPU memory."""
    if memory is None:
        raise ValueError(
            f"version {number} lies in GPU memory: WeightSender(…, on_host=True) has it on the host"
        )
    tables = [*(weights for _, _, weights in part["experts"].values()), part["dense"]]
    layout = _laid_out(tables, torch.device("meta"))
    try:
        descriptor = fetch_descriptor(
            part["socket"], number, f"version {number} is not there any more"
        )
    except (RuntimeError, TimeoutError) as error:
        # Nobody answers: its process is as good as gone.
        raise FileNotFoundError(str(error)) from error
    try:
        region = Places(memory, 1, layout.nbytes).map(0, descriptor, layout.nbytes)
    finally:
        os.close(descriptor)
    for table, name, begin in layout.places:
        table[name] = _view(region, begin, table[name])


def _laid_out(tables: list[dict[str, Tensor]], device: torch.device) -> _Layout:
    """Lay the tensors of a device out in one piece of memory, in the order of the tables."""
    places = []
    end = 0
    for table in tables:
        for name, value in table.items():
            if value.device == device:
                places.append(_Place(table, name, end))
                end = round_up(end + value.numel() * value.itemsize, BUFFER_ALIGNMENT)
    return _Layout(places, max(end, 1))


def _view(region: Tensor, begin: int, value: Tensor) -> Tensor:
    """A view of memory from byte `begin` on, with the shape and dtype of a tensor."""
    nbytes = value.numel() * value.itemsize
    return region[begin : begin + nbytes].view(value.dtype).view(value.shape)


def shared_memory(device: torch.device) -> Memory | None:
    """Memory of a GPU that other processes can map; None on CPUs, where they map files."""
    return processor_of(device).shared_memory()


def _leave_note(note: Path, error: BaseException) -> None:
    """Leave a note of a failure for the other ranks; without room for text, its name alone."""
    with suppress(OSError):
        note.touch()
        note.write_text(f"{type(error).__name__}: {error}")


def _parsed(path: Path) -> _File:
    """Read the name of a file or of a note."""
    return next(_files([path.name.removeprefix(_FAILED)]))


def _name_of(version: int, writer: _Writer) -> str:
    """The name of a file, which `_FILE` reads."""
    return f"v{version:013}.{writer.group}.{writer.rank}-of-{writer.size}"


def _files(names: Iterable[str]) -> Iterator[_File]:
    """Read the names that are names of files of versions, and skip others."""
    for name in names:
        found = _FILE.fullmatch(name)
        if found:
            version, group, rank, size = found.groups()
            yield _File(name, int(version), _Writer(group, int(rank), int(size)))


def _are_of_one_version(file: _File, other: _File) -> bool:
    same_group = file.writer.group == other.writer.group and file.writer.size == other.writer.size
    return same_group and file.version == other.version


def _complete(files: Iterable[_File]) -> list[list[_File]]:
    """The files of each complete version: all ranks of one group have written theirs."""
    versions = dict[tuple[int, str, int], list[_File]]()
    for file in files:
        key = (file.version, file.writer.group, file.writer.size)
        versions.setdefault(key, []).append(file)
    return [parts for parts in versions.values() if len(parts) == parts[0].writer.size]


def _check_number(version: int, files: list[_File], writer: _Writer) -> None:
    """Raise ValueError unless the number is above all versions that this rank has sent, and all
    whole versions of other groups.
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
    """Raise ValueError for a meta tensor."""
    for table in tables:
        for name, value in table.items():
            if value.is_meta:
                raise ValueError(f"{name!r} is a meta tensor, which has no weights to send")


def _versions_to_keep(files: list[_File], keep: int) -> set[int]:
    """The `keep` newest whole versions, and as many newer ones that are not whole yet.

    One below a whole version never becomes whole: each rank sends growing numbers.
    """
    whole = {parts[0].version for parts in _complete(files)}
    newest = max(whole, default=-1)
    unfinished = {file.version for file in files if file.version > newest}
    return {*sorted(whole)[-keep:], *sorted(unfinished)[-keep:]}


def layers_to_hand_over(model: nn.Module) -> dict[str, Any]:
    """The layers of a model by name. Raises ValueError if there is none, or one has other experts
    than `GroupedExperts`.
    """
    layers = layers_of(model)
    odd = [name for name, layer in layers.items() if not isinstance(layer.experts, GroupedExperts)]
    if layers and not odd:
        return layers
    problem = odd[0] if odd else "no MoELayer"
    raise ValueError(f"`model` must have MoELayers with GroupedExperts, got {problem!r}")


def own_folder(folder: str | os.PathLike[str]) -> Path:
    """Make the folder, if need be, and remove files of servers that were killed. Raises
    PermissionError if others could write into it.
    """
    path = Path(folder).absolute()
    path.mkdir(0o700, parents=True, exist_ok=True)
    who = who_else(path)
    if who:
        raise PermissionError(f"{path} {who}, who could put weights there: take another folder")
    remove_orphans(path)
    return path


def computes(experts: GroupedExperts) -> Computation:
    """How these experts compute."""
    return Computation(experts.interleaved, experts.limit, experts.alpha, experts.up_offset)


def _plain_tuple(experts: Experts) -> tuple[Any, ...]:
    """The fields as plain values, for a file: with `weights_only` torch loads no other classes."""
    return experts.held, tuple(experts.computes), experts.weights


def _experts_of(layer: Any) -> Experts:
    """The experts of this rank. Raises ValueError if they cannot be sent."""
    experts = layer.experts
    if experts.dtype not in FLOATS or experts.is_quantized:
        raise ValueError(
            f"experts of a trainer must be fp32, fp16 or bf16, got {describe(experts.w_down)}"
        )
    weights = {name: local_view(value.detach()) for name, value in experts.named_parameters()}
    # A row for each expert: sharded ones would be parts of experts.
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
    """Check dense weights. Returns them by their names without wrappers of torch.

    Raises TypeError if one is no plain tensor, and ValueError if a name is there twice.
    """
    for name, value in dense.items():
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not is_plain or not isinstance(name, str):
            remedy = "such as `full_tensor()` of a DTensor"
            raise TypeError(
                f"`dense[{name!r}]` must be a plain tensor, {remedy}, got {describe(value)}"
            )
    made = {name_without_wrappers(name): value.detach() for name, value in dense.items()}
    if len(made) < len(dense):
        names = Counter(map(name_without_wrappers, dense))
        raise ValueError(f"`dense` must have each weight once, got {names.most_common(1)[0][0]!r}")
    return made


def _plain(value: Tensor) -> Tensor:
    """Copy a value to the CPU, into memory of its own size: a file gets all of its memory."""
    value = value.detach().cpu().contiguous()
    is_part = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if is_part else value
