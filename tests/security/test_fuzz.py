"""Bytes that somebody with the password could send: decoding gives a value or a `ProtocolError`, and allocates little.

`tests/fuzz/fuzz_wire.py` goes further, with more time and guided by coverage.
"""

import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from srl.base.errors import ProtocolError
from srl.runner.distribution.wire import decode_experience, decode_tree

CORPUS = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "fuzz" / "corpus").iterdir())]
HEADER = 24
MOST_BYTES = 32 * 2**20


def with_checksum(data: bytes) -> bytes:
    return data[:20] + struct.pack("<I", zlib.crc32(data[HEADER:], zlib.crc32(data[:20]))) + data[HEADER:]


def decode(data: bytes) -> int:
    """Decode as both kinds; returns how many succeeded."""
    decoded = 0
    for decoder in (decode_experience, decode_tree):
        try:
            decoder(data)
            decoded += 1
        except ProtocolError as error:
            assert len(str(error)) < 10_000
    return decoded


@pytest.mark.parametrize("data", CORPUS)
def test_the_corpus_is_of_real_messages(data: bytes) -> None:
    assert decode(data) == 1 and with_checksum(data) == data


@settings(max_examples=600, deadline=None)
@given(
    data=st.sampled_from(CORPUS),
    changes=st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=9), st.booleans()), max_size=6),
    length=st.one_of(st.none(), st.integers(HEADER, 9_000)),
)
@example(data=CORPUS[0], changes=[(8, b"\xff" * 8, True)], length=None)
@example(data=CORPUS[0], changes=[(16, b"\xff" * 4, True)], length=None)
def test_changed_messages(data: bytes, changes: list[tuple[int, bytes, bool]], length: int | None) -> None:
    for position, replacement, is_insertion in changes:
        at = min(position, len(data))
        data = data[:at] + replacement + data[at + (0 if is_insertion else len(replacement)) :]
    data = data[:length]
    if len(data) >= HEADER:
        data = with_checksum(data)
    tracemalloc.start()
    try:
        decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


def claims(size: int) -> bytes:
    """Return a frame of Zstandard that says it holds `size` zeros, and does."""
    import zstandard

    return zstandard.ZstdCompressor(level=19).compress(bytes(size))


@pytest.mark.parametrize("announced", [0, 1, 2**20, 2**63 - 1])
def test_a_compressed_message_that_holds_more_than_it_announces(announced: int) -> None:
    """64 MB of zeros, in some KB."""
    import msgspec

    bomb = claims(64 * 2**20)
    segment = [2**16 // 1024 + 1, 2, 0, 0, 0, 0, 0]
    block = [["uint8", [1024, 1024]], len(bomb), ["int32", []], False, {}, [segment]]
    header = msgspec.msgpack.encode(["actor-0/1:a", 0, 0, [], [], [], [block]])
    rest = header + bytes(-(HEADER + len(header)) % 8) + bomb
    prefix = struct.pack("<4sHHQI", b"SRL\xa7", 3, 1, min(HEADER + len(rest) + announced, 2**64 - 1), len(header))
    data = with_checksum(prefix + bytes(4) + rest)
    tracemalloc.start()
    try:
        assert decode(data) == 0
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
