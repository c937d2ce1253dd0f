"""Coverage-guided fuzzing of what decodes bytes of the network: run it where atheris is installed.

    python tests/fuzz/fuzz_wire.py -runs=1000000 tests/fuzz/corpus

Whatever comes, decoding returns a value or raises `ProtocolError`, and allocates little beyond what came. The checksum
is set right before decoding, as somebody with the password would; else nothing would get past it.
"""

import struct
import sys
import tracemalloc
import zlib

import atheris

with atheris.instrument_imports(include=["srl.runner.distribution.wire"]):
    from srl.runner.distribution.wire import decode_experience, decode_tree

from srl.base.errors import ProtocolError

MOST_BYTES = 64 * 2**20
"""For a message of some KB; a frame of pictures may unpack to more than it has, but not to this."""


def with_checksum(data: bytes) -> bytes:
    """Return a message that says the truth about its own bytes."""
    if len(data) < 24:
        return data
    checksum = zlib.crc32(data[24:], zlib.crc32(data[:20]))
    return data[:20] + struct.pack("<I", checksum) + data[24:]


def decode(data: bytes) -> None:
    """Decode bytes as both kinds of message, and as they are or with the right checksum."""
    for message in (data, with_checksum(data)):
        for decoder in (decode_experience, decode_tree):
            try:
                decoder(message)
            except ProtocolError:
                continue


def main() -> None:
    """Fuzz; the most memory at any time is checked now and then, as that is slow."""
    count = 0

    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        if count % 100:
            decode(data)
            return
        tracemalloc.start()
        try:
            decode(data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak < MOST_BYTES, f"{peak} bytes for a message of {len(data)}"
        finally:
            tracemalloc.stop()

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
