"""Messages between actors, trainer and client: typed headers and raw array buffers, never code.

The broker layer encodes experience and parameter trees with this and decodes what others sent. Decoding
trusts nothing: every size is checked before anything is allocated, and all that is wrong is a `ProtocolError`.

A message, little-endian: magic (4 bytes), protocol version (2), kind (2), bytes that it would have without
compression (8), header length (4), CRC-32 of all other bytes (4), the header (msgpack), zeros up to a multiple
of 8, then arrays, each column starting at a multiple of 8. Columns of large frames are Zstandard frames where
that is shorter: pictures that follow each other differ little.
"""

import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from srl.base.algorithm import LARGE_FRAME_BYTES, Tree
from srl.base.errors import ProtocolError
from srl.base.segment import End, Segment

PROTOCOL_VERSION = 3
"""Goes up with every change that an older reader would misread."""

MAX_MESSAGE_BYTES = 512 * 2**20
"""The largest value that a Redis server takes; and the most that a message may hold when it is unpacked."""
MAX_RANK = 8
MAX_DEPTH = 32
MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 2**20
MAX_COMPRESSION_WINDOW_BYTES = 2**23
MAX_ITEMS = 2**16
"""Most segments, episodes or leaves in one message."""

Scalar: TypeAlias = str | int | float | bool | None

_MAGIC = b"SRL\xa7"
_PREFIX = struct.Struct("<4sHHQI")
_CHECKSUM = struct.Struct("<I")
_BODY = _PREFIX.size + _CHECKSUM.size
_ALIGNMENT = 8
_EXPERIENCE, _TREE = 1, 2
_KINDS = {_EXPERIENCE: "experience", _TREE: "a tree"}

_DTypeName = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in _DTypeName.__args__  # type: ignore[attr-defined]
}
_NAMES: dict[np.dtype[Any], _DTypeName] = {dtype: name for name, dtype in _DTYPES.items()}  # type: ignore[misc]
_FLOAT32 = _DTYPES["float32"]

_Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Dimension = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]


class EvaluationRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A finished greedy evaluation of the parameters that `train_count` updates had made.

    Attributes:
        time_s: when it ended, since the task's start.
    """

    train_count: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    episodes: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    mean_reward: float
    time_s: Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, eq=False)
class Experience:
    """What an actor sends at once.

    Attributes:
        actor: unique id of the actor process.
        sequence: number of this message within its actor; with `actor` it tells a message sent twice.
        env_steps: env steps that this message counts and no other does.
        episode_rewards, episode_lengths: of the episodes that ended since the last message, as the env gave them.
        evaluations: those that ended since the last message.
    """

    actor: str
    sequence: int
    segments: Sequence[Segment]
    env_steps: int = 0
    episode_rewards: Sequence[float] = field(default_factory=list)
    episode_lengths: Sequence[int] = field(default_factory=list)
    evaluations: Sequence[EvaluationRecord] = field(default_factory=list)


class _Struct(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


class _Layout(_Struct):
    """An array: `shape` is whole for a leaf of a tree, without the first dimension for a column of a block."""

    dtype: _DTypeName
    shape: Annotated[tuple[_Dimension, ...], Meta(max_length=MAX_RANK)]


class _SegmentHeader(_Struct):
    frames: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    end: End
    context: _Natural
    lane: _Natural
    sequence: _Natural
    version: Annotated[int, Meta(ge=-1, le=2**63 - 1)]
    priorities: _Dimension


class _Block(_Struct):
    """Consecutive segments whose arrays differ in length only; each kind of array is one column of bytes."""

    frames: _Layout
    compressed_bytes: _Natural  # of the frames' column; 0 where it is not compressed
    actions: _Layout
    has_priorities: bool
    extras: Annotated[dict[_Name, _Layout], Meta(max_length=64)]
    segments: Annotated[list[_SegmentHeader], Meta(min_length=1, max_length=MAX_ITEMS)]


class _ExperienceHeader(_Struct):
    actor: _Name
    sequence: _Natural
    env_steps: _Natural
    episode_rewards: Annotated[list[float], Meta(max_length=MAX_ITEMS)]
    episode_lengths: Annotated[list[_Natural], Meta(max_length=MAX_ITEMS)]
    evaluations: Annotated[list[EvaluationRecord], Meta(max_length=64)]
    blocks: Annotated[list[_Block], Meta(max_length=MAX_ITEMS)]


class _Leaf(_Struct):
    """`value` is an array's layout, a scalar, `{"int": hexadecimal}` for more than 64 bits, or `{}`, an empty dict."""

    path: Annotated[list[_Name], Meta(min_length=1, max_length=MAX_DEPTH)]
    value: (
        _Layout
        | _Text
        | int
        | float
        | bool
        | dict[Literal["int"], Annotated[str, Meta(pattern="^-?[0-9a-f]{1,2048}$")]]
        | None
    )


class _TreeHeader(_Struct):
    metadata: Annotated[dict[_Name, _Text | int | float | bool | None], Meta(max_length=1024)]
    leaves: Annotated[list[_Leaf], Meta(max_length=MAX_ITEMS)]


_H = TypeVar("_H", _ExperienceHeader, _TreeHeader)
_ENCODER = msgspec.msgpack.Encoder()
_EXPERIENCE_DECODER = msgspec.msgpack.Decoder(_ExperienceHeader)
_TREE_DECODER = msgspec.msgpack.Decoder(_TreeHeader)


def encode_experience(experience: Experience) -> bytes:
    """Return a message; segments may differ in their spaces, but few kinds in a row are quickest.

    Raises `ProtocolError` where an array cannot be sent (its dtype, or lengths that do not agree).
    """
    body = _Body()
    blocks = []
    for _, run in itertools.groupby(experience.segments, _segment_key):
        segments = list(run)
        first = segments[0]
        headers = [_segment_header(segment) for segment in segments]
        frames, compressed_bytes = body.frames([segment.frames for segment in segments])
        actions = body.column("actions", [segment.actions for segment in segments])
        body.column("rewards", [np.asarray(segment.rewards, _FLOAT32) for segment in segments])
        priorities = [np.asarray(s.priorities, _FLOAT32) for s in segments if s.priorities is not None]
        if priorities:
            body.column("priorities", priorities)
        extras = {
            name: body.column(f"extras[{name!r}]", [segment.extras[name] for segment in segments])
            for name in first.extras
        }
        blocks.append(_Block(frames, compressed_bytes, actions, bool(priorities), extras, headers))
    header = _ExperienceHeader(
        experience.actor,
        int(experience.sequence),
        int(experience.env_steps),
        [float(reward) for reward in experience.episode_rewards],
        [int(length) for length in experience.episode_lengths],
        list(experience.evaluations),
        blocks,
    )
    return _message(_EXPERIENCE, header, _EXPERIENCE_DECODER, body)


def decode_experience(data: bytes | memoryview) -> Experience:
    """Return what `encode_experience` was given; arrays are read-only views of `data`."""
    header, body = _open(data, _EXPERIENCE, _EXPERIENCE_DECODER)
    segments: list[Segment] = []
    for block in header.blocks:
        for segment in block.segments:
            steps = segment.frames - 1
            _check_counts(steps, segment.context, segment.priorities)
        counts = [segment.frames for segment in block.segments]
        step_counts = [count - 1 for count in counts]
        frames = body.split(block.frames, counts, block.compressed_bytes)
        actions = body.split(block.actions, step_counts)
        rewards = body.split(_Layout("float32", ()), step_counts)
        priorities: list[Any] = [None] * len(counts)
        if block.has_priorities:
            priorities = body.split(_Layout("float32", ()), [segment.priorities for segment in block.segments])
        extras = {name: body.split(layout, step_counts) for name, layout in block.extras.items()}
        segments.extend(
            Segment(
                frames[i], actions[i], rewards[i], item.end, item.context, item.lane, item.sequence, item.version,
                priorities[i], {name: column[i] for name, column in extras.items()},
            )
            for i, item in enumerate(block.segments)
        )  # fmt: skip
    body.finish()
    return Experience(
        header.actor, header.sequence, segments, header.env_steps, header.episode_rewards, header.episode_lengths,
        header.evaluations,
    )  # fmt: skip


def encode_tree(tree: Tree, metadata: Mapping[str, Scalar]) -> bytes:
    """Return a message of a tree (parameters, a learner's state) and some facts about it.

    Leaves are arrays of numbers or bool (anything numpy takes; numpy scalars become arrays without
    dimensions) and Python `int`, `float`, `str`, `bool` and `None`. Raises `ProtocolError` naming any other leaf.
    """
    body = _Body()
    leaves = [_Leaf(path, _leaf(body, path, value)) for path, value in _flatten(tree, [])]
    return _message(_TREE, _TreeHeader(dict(metadata), leaves), _TREE_DECODER, body)


def decode_tree(data: bytes | memoryview) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree and the metadata of an `encode_tree` message; arrays are read-only views of `data`."""
    header, body = _open(data, _TREE, _TREE_DECODER)
    tree: dict[str, Any] = {}
    for leaf in header.leaves:
        *parents, last = leaf.path
        node: Any = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ProtocolError(f"the tree has {'/'.join(leaf.path)!r} twice, or something below a leaf")
        value: Any = leaf.value
        if isinstance(value, _Layout):
            value = body.take(value.dtype, value.shape)
        elif isinstance(value, dict) and value:
            value = int(value["int"], 16)
        node[last] = value
    body.finish()
    return tree, header.metadata


def unpacked_bytes(message: bytes) -> int:
    """Return the bytes that a message has without compression; what is no message has its own length.

    The backlog counts these: how much play waits there must not depend on how well its pictures compress.
    """
    if len(message) < _BODY or not message.startswith(_MAGIC):
        return len(message)
    size: int = _PREFIX.unpack_from(message)[3]
    return size if len(message) <= size <= MAX_MESSAGE_BYTES else len(message)


def _segment_key(segment: Segment) -> tuple[Any, ...]:
    frames, actions = segment.frames, segment.actions
    extras = tuple((name, array.dtype, array.shape[1:]) for name, array in segment.extras.items())
    return frames.dtype, frames.shape[1:], actions.dtype, actions.shape[1:], segment.priorities is None, extras


def _segment_header(segment: Segment) -> _SegmentHeader:
    steps = len(segment.frames) - 1
    for what, array in (("actions", segment.actions), ("rewards", segment.rewards), *segment.extras.items()):
        if len(array) != steps:
            raise ProtocolError(f"a segment has {steps + 1} frames, but {len(array)} {what} instead of {steps}")
    if segment.rewards.ndim != 1 or (segment.priorities is not None and segment.priorities.ndim != 1):
        raise ProtocolError("a segment's rewards and priorities must have one dimension")
    priorities = 0 if segment.priorities is None else len(segment.priorities)
    _check_counts(steps, segment.context, priorities)
    return _SegmentHeader(
        steps + 1, End(segment.end), int(segment.context), int(segment.lane), int(segment.sequence),
        int(segment.version), priorities,
    )  # fmt: skip


def _check_counts(steps: int, context: int, priorities: int) -> None:
    if context > steps or priorities > steps:
        raise ProtocolError(f"a segment of {steps} steps claims {context} context frames and {priorities} priorities")


def _flatten(tree: Mapping[str, Any], path: list[str]) -> Iterator[tuple[list[str], Any]]:
    if len(path) >= MAX_DEPTH:
        raise ProtocolError(f"the tree is deeper than {MAX_DEPTH} at {'/'.join(path)!r}")
    for key, value in tree.items():
        below = [*path, _name(key)]
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, below)
        else:
            yield below, value


def _leaf(body: "_Body", path: list[str], value: Any) -> Any:
    if isinstance(value, np.generic):  # np.float64 is a float too
        return body.array("/".join(path), np.asarray(value))
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**64:
            return value
        return {"int": f"{value:x}"}
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {}
    if hasattr(value, "__array__"):
        return body.array("/".join(path), np.asarray(value))
    raise ProtocolError(f"the tree's leaf {'/'.join(path)!r} cannot be sent: {type(value).__name__} {value!r:.80}")


def _name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise ProtocolError(f"names are text of at most {MAX_NAME_LENGTH} characters, not {name!r:.80}")
    return name


class _Body:
    """The arrays of a message that is being written."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size = 0
        self.saved = 0  # bytes that compression saved

    def column(self, what: str, arrays: list[np.ndarray]) -> _Layout:
        """Append arrays that differ in their first dimension only."""
        first = arrays[0]
        layout = self._layout(what, first.dtype, first.shape[1:])
        self._append(layout, arrays)
        return layout

    def frames(self, arrays: list[np.ndarray]) -> tuple[_Layout, int]:
        """Append a column of frames, large ones compressed if that is shorter; returns to how many bytes, or 0."""
        first = arrays[0]
        layout = self._layout("frames", first.dtype, first.shape[1:])
        if first[:1].nbytes >= LARGE_FRAME_BYTES:
            raw = np.concatenate(arrays, dtype=_DTYPES[layout.dtype])
            # The lowest level: pictures shrink to a hundredth at gigabytes a second, and higher ones gain little.
            compressed = zstandard.ZstdCompressor(level=1).compress(raw.data)
            if len(compressed) < raw.nbytes:
                self._append(_Layout("uint8", ()), [np.frombuffer(compressed, np.uint8)])
                self.saved += raw.nbytes - len(compressed)
                return layout, len(compressed)
        self._append(layout, arrays)
        return layout, 0

    def array(self, what: str, array: np.ndarray) -> _Layout:
        """Append one array."""
        layout = self._layout(what, array.dtype, array.shape)
        self._append(layout, [array])
        return layout

    def _layout(self, what: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Layout:
        name = _NAMES.get(dtype) or _NAMES.get(dtype.newbyteorder("<"))
        if name is None:
            raise ProtocolError(f"{what} has dtype {dtype}, which is not sent; cast it to one of {', '.join(_DTYPES)}")
        if len(shape) > MAX_RANK:
            raise ProtocolError(f"{what} has {len(shape)} dimensions, at most {MAX_RANK} are sent")
        return _Layout(name, shape)

    def _append(self, layout: _Layout, arrays: list[np.ndarray]) -> None:
        dtype = _DTYPES[layout.dtype]
        padding = -self.size % _ALIGNMENT
        if padding:
            self.parts.append(bytes(padding))
        # asarray keeps 0-d arrays as they are, which ascontiguousarray does not.
        contiguous = [np.asarray(array, dtype, order="C") for array in arrays]
        self.parts.extend(array for array in contiguous if array.size)
        self.size += padding + sum(array.nbytes for array in contiguous)


class _Arrays:
    """The arrays of a message that is being read, in the order they were written."""

    def __init__(self, data: bytes | memoryview, offset: int, saved: int) -> None:
        self._data = data
        self._offset = offset + -offset % _ALIGNMENT
        self._saved = saved  # bytes that the columns still to come may be larger unpacked

    def split(self, layout: _Layout, counts: list[int], compressed_bytes: int = 0) -> list[np.ndarray]:
        """Take a column and return one view for each count of rows."""
        shape = (sum(counts), *layout.shape)
        if compressed_bytes:
            size = _checked_bytes(layout.dtype, shape)
            self._saved -= size - compressed_bytes
            if self._saved < 0:
                raise ProtocolError("the message has more in compressed frames than it announces")
            data = _decompress(self.take("uint8", (compressed_bytes,)), size)
            column = _view(data, 0, layout.dtype, shape)
        else:
            column = self.take(layout.dtype, shape)
        ends = list(itertools.accumulate(counts))
        return [column[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def take(self, dtype_name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Take the next array."""
        start = self._offset + -self._offset % _ALIGNMENT
        end = start + _checked_bytes(dtype_name, shape)
        if end > len(self._data):
            raise ProtocolError(f"the message ends inside an array of shape {shape} and dtype {dtype_name}")
        self._offset = end
        return _view(self._data, start, dtype_name, shape)

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self._offset != len(self._data):
            raise ProtocolError(f"the message has {len(self._data)} bytes, but its arrays end at {self._offset}")
        if self._saved:
            raise ProtocolError(f"the message has {self._saved} bytes less in compressed frames than it announces")


def _checked_bytes(dtype_name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array; refuse one above the limit."""
    itemsize = _DTYPES[dtype_name].itemsize
    # Empty dimensions count as one here: numpy refuses shapes whose other dimensions overflow.
    if itemsize * math.prod(length or 1 for length in shape) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an array of shape {shape} and dtype {dtype_name} is above the limit")
    return itemsize * math.prod(shape)


def _view(data: bytes | memoryview, start: int, dtype_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a read-only view of an array's bytes."""
    dtype = _DTYPES[dtype_name]
    if dtype.kind == "b":
        raw = np.ndarray(shape, np.uint8, data, start)
        if raw.size and raw.max() > 1:
            raise ProtocolError("an array of bool holds values that are neither 0 nor 1")
        array: np.ndarray = raw.view(np.bool_)
    else:
        array = np.ndarray(shape, dtype, data, start)
    array.flags.writeable = False
    return array


def _decompress(compressed: np.ndarray, size: int) -> bytes:
    """Return the `size` bytes that a Zstandard frame holds; nothing is allocated for one that says another size."""
    try:
        if zstandard.frame_content_size(compressed.data) != size:
            raise ProtocolError(f"compressed frames do not hold the {size} bytes that the message announces")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_COMPRESSION_WINDOW_BYTES)
        return decompressor.decompress(compressed.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"compressed frames are damaged: {error}") from error


def _message(kind: int, header: msgspec.Struct, decoder: "msgspec.msgpack.Decoder[Any]", body: _Body) -> bytes:
    try:
        encoded = _ENCODER.encode(header)
        decoder.decode(encoded)  # Limits must show here, not with the receiver; this takes microseconds.
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ProtocolError(f"the message cannot be written: {error}") from error
    padding = -(_BODY + len(encoded)) % _ALIGNMENT
    size = _BODY + len(encoded) + padding + body.size + body.saved
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}; send less at once")
    prefix = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, kind, size, len(encoded))
    checksum = zlib.crc32(prefix)
    parts = [encoded, bytes(padding), *body.parts]
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([prefix, _CHECKSUM.pack(checksum), *parts])


def _open(data: bytes | memoryview, kind: int, decoder: "msgspec.msgpack.Decoder[_H]") -> tuple[_H, _Arrays]:
    """Check a message's frame and header."""
    if not _BODY <= len(data) <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes: it was cut short or is no message of SRL")
    magic, version, found, size, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("not a message of SRL: something else writes to this broker's keys")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the message has protocol version {version}, this process speaks version {PROTOCOL_VERSION}; "
            "run the same version of SRL everywhere"
        )
    view = memoryview(data)
    if zlib.crc32(view[_BODY:], zlib.crc32(view[: _PREFIX.size])) != _CHECKSUM.unpack_from(data, _PREFIX.size)[0]:
        raise ProtocolError("the message is damaged: its checksum does not fit its contents")
    if found != kind:
        raise ProtocolError(f"the message is {_KINDS.get(found, f'of kind {found}')}, not {_KINDS[kind]}")
    if not len(data) <= size <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes announces {size}; at most {MAX_MESSAGE_BYTES} are taken")
    if length > len(data) - _BODY:
        raise ProtocolError(f"the message ends inside its header of {length} bytes")
    try:
        header = decoder.decode(view[_BODY : _BODY + length])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the message's header is wrong: {error}") from error
    return header, _Arrays(data, _BODY + length, size - len(data))
