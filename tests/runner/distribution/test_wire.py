import dataclasses
import struct
import zlib

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from srl.base.errors import ProtocolError
from srl.base.segment import End, Segment
from srl.runner.distribution import wire
from srl.runner.distribution.wire import (
    PROTOCOL_VERSION,
    Experience,
    decode_experience,
    decode_tree,
    encode_experience,
    encode_tree,
    unpacked_bytes,
)

quick = settings(max_examples=40, deadline=None)


def segment(steps=3, *, shape=(2,), dtype="float32", end=End.CUT, known=True, with_extras=(), seed=0, **changes):
    rng = np.random.default_rng(seed)
    frames = (rng.random((steps + 1, *shape)) * 200).astype(dtype)
    return dataclasses.replace(
        Segment(
            frames=frames,
            actions=rng.integers(0, 9, steps).astype(np.int32),
            rewards=rng.standard_normal(steps).astype(np.float32),
            end=end,
            context=0,
            lane=5,
            sequence=7,
            version=11,
            priorities=rng.random(steps).astype(np.float32) if known else None,
            extras={name: rng.random((steps, 2)) for name in with_extras},
        ),
        **changes,
    )


def assert_same_array(left, right):
    assert isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.tobytes() == right.tobytes()  # bit-equal, so NaN too


def assert_same_segment(left, right):
    for name in ("frames", "actions", "rewards"):
        assert_same_array(getattr(left, name), getattr(right, name))
    for name in ("end", "context", "lane", "sequence", "version"):
        assert getattr(left, name) == getattr(right, name)
    assert isinstance(right.end, End)
    if left.priorities is None:
        assert right.priorities is None
    else:
        assert_same_array(left.priorities, right.priorities)
    assert list(left.extras) == list(right.extras)
    for name in left.extras:
        assert_same_array(left.extras[name], right.extras[name])


def assert_same_tree(left, right):
    assert list(left) == list(right)
    for key, value in left.items():
        if isinstance(value, dict):
            assert_same_tree(value, right[key])
        elif isinstance(value, (np.ndarray, np.generic)):
            assert_same_array(np.asarray(value), right[key])
        else:
            assert type(value) is type(right[key])
            assert repr(value) == repr(right[key])


def test_experience_of_mixed_segments_comes_back_in_order():
    segments = [
        segment(4, context=2, seed=1),
        segment(1, end=End.TERMINATED, seed=2),
        segment(3, shape=(4, 5), dtype="uint8", known=False, end=End.TRUNCATED, seed=3),
        segment(2, with_extras=("logits", "state"), seed=4),
        segment(2, shape=(), dtype="int64", seed=5, actions=np.ones((2, 3), np.float32)),
        segment(4, known=False, seed=6),
        segment(3, seed=7, priorities=np.array([1, np.nan], np.float32)),
    ]
    sent = Experience("actor-1", 3, segments, 21, [1.5, -2.0], [200, 3])
    received = decode_experience(encode_experience(sent))
    assert (received.actor, received.sequence, received.env_steps) == ("actor-1", 3, 21)
    assert (received.episode_rewards, received.episode_lengths) == ([1.5, -2.0], [200, 3])
    assert len(received.segments) == len(segments)
    for left, right in zip(segments, received.segments, strict=True):
        assert_same_segment(left, right)


def test_experience_without_segments_still_counts():
    received = decode_experience(encode_experience(Experience("a", 0, [], 17, [], [])))
    assert list(received.segments) == [] and received.env_steps == 17


@quick
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from([(), (3,), (2, 2), (0, 2)]),
            st.sampled_from(sorted(wire._DTYPES)),
            st.sampled_from(list(End)),
            st.booleans(),
            st.sampled_from([(), ("a",), ("a", "b")]),
        ),
        max_size=6,
    )
)
def test_any_experience_comes_back_equal(descriptions):
    segments = [
        segment(steps, shape=shape, dtype=dtype, end=end, known=known, with_extras=extras, seed=i, sequence=i)
        for i, (steps, shape, dtype, end, known, extras) in enumerate(descriptions)
    ]
    received = decode_experience(encode_experience(Experience("a", 1, segments)))
    assert len(received.segments) == len(segments)
    for left, right in zip(segments, received.segments, strict=True):
        assert_same_segment(left, right)


def test_decoded_arrays_are_aligned_read_only_views():
    data = encode_experience(
        Experience("a", 1, [segment(3, dtype="uint8", shape=(3,)), segment(2, with_extras=("x",))])
    )
    for decoded in decode_experience(data).segments:
        for array in (decoded.frames, decoded.actions, decoded.rewards, decoded.priorities, *decoded.extras.values()):
            assert array.flags.aligned
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_arrays_may_be_strided_or_big_endian():
    frames = np.arange(24, dtype=">f4").reshape(6, 4)[::2, ::-1]
    sent = segment(2, frames=frames, actions=np.arange(4, dtype=np.int32)[::2])
    received = decode_experience(encode_experience(Experience("a", 1, [sent]))).segments[0]
    np.testing.assert_array_equal(received.frames, frames)
    assert received.frames.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(received.actions, [0, 2])


leaves = st.one_of(
    hnp.arrays(st.sampled_from(list(wire._DTYPES.values())), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.just({}),
)
trees = st.dictionaries(
    st.text(max_size=8),
    st.recursive(leaves, lambda inner: st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8),
    max_size=4,
)


@quick
@given(trees, st.dictionaries(st.text(max_size=8), st.one_of(st.integers(0, 2**63), st.text(), st.none()), max_size=3))
def test_any_tree_comes_back_equal(tree, metadata):
    received, received_metadata = decode_tree(encode_tree(tree, metadata))
    assert_same_tree(tree, received)
    assert received_metadata == metadata


def test_tree_keeps_what_learners_need():
    state = np.random.default_rng(3).bit_generator.state  # holds ints of 128 bits
    tree = {
        "key": np.array([1, 2**32 - 1], np.uint32),
        "count": np.array(2**62 + 1, np.int64),
        "scale": np.float64(0.1),
        "rng": state,
        "none": {"empty": {}, "nothing": None},
        "nan": float("nan"),
    }
    received, _ = decode_tree(encode_tree(tree, {}))
    assert_same_tree(tree, received)


def test_tree_takes_arrays_of_other_libraries():
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.int16)

    received, _ = decode_tree(encode_tree({"a": Foreign()}, {}))
    assert_same_array(received["a"], np.arange(3, dtype=np.int16))


MESSAGES = [
    (
        encode_experience(Experience("a", 1, [segment(2), segment(1, with_extras=("x",))], 3, [1.0], [2])),
        decode_experience,
    ),
    (encode_tree({"a": {"b": np.arange(5)}, "c": "text", "d": np.array([True])}, {"v": 1}), decode_tree),
]


@pytest.mark.parametrize(("data", "decode"), MESSAGES, ids=["experience", "tree"])
def test_every_truncation_and_every_flipped_bit_is_refused(data, decode):
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length])
    for position in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[position] ^= bit
            with pytest.raises(ProtocolError):
                decode(bytes(changed))
    with pytest.raises(ProtocolError):
        decode(data + b"\0")


@quick
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    for decode in (decode_experience, decode_tree):
        with pytest.raises(ProtocolError):
            decode(data)


def forged(kind: int, header: bytes, body: bytes = b"", saved: int = 0) -> bytes:
    """Return a message whose frame is right, as somebody with the password could write it.

    It announces `saved` bytes more than it has.
    """
    rest = header + bytes(-(24 + len(header)) % 8) + body
    prefix = struct.pack("<4sHHQI", b"SRL\xa7", PROTOCOL_VERSION, kind, 24 + len(rest) + saved, len(header))
    return prefix + struct.pack("<I", zlib.crc32(rest, zlib.crc32(prefix))) + rest


def tree_message(*tree_leaves, body=b""):
    return forged(2, msgspec.msgpack.encode([{}, list(tree_leaves)]), body)


def test_forged_messages_are_read_where_they_are_right():
    """The negative cases below would prove nothing if `forged` made messages that are wrong anyway."""
    tree, _ = decode_tree(tree_message([["a"], ["uint8", [2]]], body=b"\1\2"))
    assert_same_array(tree["a"], np.array([1, 2], np.uint8))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (forged(2, b"\x92\x80\xdd\xff\xff\xff\xff"), "length <="),
        (forged(2, b"\x92\xdf\xff\xff\xff\xff"), "length <="),
        (forged(2, b"\x92\x80\x91\x92\x91\xdb\xff\xff\xff\xff"), "truncated"),
        (forged(2, b"\x91" * 100_000), "header is wrong"),
        (forged(2, b"\x92\x80\x91\x92\x91\xa2\xff\xfe\x01"), "header is wrong"),
        (tree_message([["a"], ["float32", [2**31 - 1] * 8]]), "above the limit"),
        (tree_message([["a"], ["float32", [2**31 - 1] * 7 + [0]]]), "above the limit"),
        (tree_message([["a"], ["float32", [2**31]]]), "header is wrong"),
        (tree_message([["a"], ["float32", [-1]]]), "header is wrong"),
        (tree_message([["a"], ["float32", [1] * 9]]), "length <="),
        (tree_message([["a"], ["float32", [2]]], body=bytes(4)), "ends inside an array"),
        (tree_message([["a"], ["float32", [2]]], body=bytes(12)), "arrays end at"),
        (tree_message([["a"], ["object", [1]]], body=bytes(8)), "header is wrong"),
        (tree_message([["a"], ["complex64", [1]]], body=bytes(8)), "header is wrong"),
        (tree_message([["a"], ["bool", [2]]], body=b"\1\2"), "neither 0 nor 1"),
        (tree_message([["a"], 1], [["a", "b"], 1]), "below a leaf"),
        (tree_message([["a"], 1], [["a"], 2]), "twice"),
        (tree_message([["a"] * 33, 1]), "length <="),
        (tree_message([["a" * 257], 1]), "header is wrong"),
        (tree_message([["a"], {"int": "zz"}]), "header is wrong"),
        (tree_message([["a"], {"int": "1" * 5000}]), "header is wrong"),
        (tree_message([[], 1]), "header is wrong"),
        (tree_message([["a"], 1, 2]), "header is wrong"),
        (forged(7, b"\x92\x80\x90"), "kind 7"),
    ],
)
def test_forged_trees_are_refused(data, says):
    with pytest.raises(ProtocolError, match=says):
        decode_tree(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: 0}, "header is wrong"),  # no frame at all
        ({1: 3}, "header is wrong"),  # an end that does not exist
        ({2: 4}, "context"),
        ({3: -1}, "header is wrong"),
        ({6: 4}, "priorities"),
    ],
)
def test_forged_segments_are_refused(change, says):
    item = [4, 2, 0, 0, 0, 0, 3]
    body = bytes(16) + bytes(16) + bytes(16) + bytes(12)
    for changed, expectation in ((False, None), (True, says)):
        values = [change.get(i, value) if changed else value for i, value in enumerate(item)]
        block = [["float32", []], 0, ["int32", []], True, {}, [values]]
        data = forged(1, msgspec.msgpack.encode(["a", 1, 1, [], [], [], [block]]), body)
        if expectation is None:
            assert len(decode_experience(data).segments[0].frames) == 4
        else:
            with pytest.raises(ProtocolError, match=expectation):
                decode_experience(data)


def test_another_version_is_named_with_ours():
    for data, decode in MESSAGES:
        other = data[:4] + struct.pack("<H", PROTOCOL_VERSION + 41) + data[6:]
        with pytest.raises(ProtocolError, match=rf"version {PROTOCOL_VERSION + 41}\b.*version {PROTOCOL_VERSION}\b"):
            decode(other)


def test_a_message_of_the_other_kind_is_refused():
    with pytest.raises(ProtocolError, match="a tree, not experience"):
        decode_experience(MESSAGES[1][0])
    with pytest.raises(ProtocolError, match="experience, not a tree"):
        decode_tree(MESSAGES[0][0])


def test_a_message_above_the_limit_is_refused_at_both_ends(monkeypatch):
    data = encode_tree({"a": np.zeros(1000)}, {})
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4000)
    with pytest.raises(ProtocolError, match="4000"):
        encode_tree({"a": np.zeros(1000)}, {})
    with pytest.raises(ProtocolError, match=str(len(data))):
        decode_tree(data)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"net": {"w": np.array([None])}}, "net/w has dtype object"),
        ({"net": {"w": np.array(["text"])}}, "net/w has dtype"),
        ({"z": np.zeros(2, np.complex64)}, "complex64"),
        ({"z": [1, 2]}, "'z' cannot be sent: list"),
        ({"z": b"bytes"}, "'z' cannot be sent: bytes"),
        ({3: 1}, "names are text"),
        ({"a": np.zeros((1,) * 9)}, "9 dimensions"),
        ({"a": "x" * (wire.MAX_TEXT_LENGTH + 1)}, "cannot be written"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(tree, says):
    with pytest.raises(ProtocolError, match=says):
        encode_tree(tree, {})


def test_a_tree_without_end_is_refused():
    tree: dict = {}
    tree["again"] = tree | {"x": tree}
    tree["again"]["x"] = tree
    with pytest.raises(ProtocolError, match="deeper than"):
        encode_tree(tree, {})


def test_metadata_is_checked_by_the_sender():
    with pytest.raises(ProtocolError, match="cannot be written"):
        encode_tree({}, {"nested": {"a": 1}})
    with pytest.raises(ProtocolError, match="cannot be written"):
        encode_tree({}, {"object": object()})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actions": np.zeros(2, np.int32)}, "2 actions instead of 3"),
        ({"rewards": np.zeros(4, np.float32)}, "4 rewards instead of 3"),
        ({"extras": {"logits": np.zeros((1, 2))}}, "1 logits instead of 3"),
        ({"frames": np.array([None] * 4)}, "frames has dtype object"),
        ({"context": 9}, "context"),
        ({"priorities": np.zeros(4, np.float32)}, "priorities"),
    ],
)
def test_segments_that_do_not_agree_are_refused_by_the_sender(changes, says):
    with pytest.raises(ProtocolError, match=says):
        encode_experience(Experience("a", 1, [segment(3, **changes)]))


# --- compressed frames ------------------------------------------------------------------------------------


def pictures(steps=8, seed=0):
    """Frames that follow each other: a noise background and a moving square."""
    frames = np.broadcast_to(
        np.random.default_rng(seed).integers(0, 256, (40, 40), np.uint8), (steps + 1, 40, 40)
    ).copy()
    for step in range(steps + 1):
        frames[step, step : step + 4, 10:14] = 255
    return frames


def sent(*frames):
    segments = [segment(len(item) - 1, frames=item, sequence=index) for index, item in enumerate(frames)]
    return encode_experience(Experience("a", 0, segments))


def test_large_frames_are_sent_compressed_and_come_back_equal():
    frames = [pictures(8), pictures(5, seed=1), pictures(1)]
    data = sent(*frames)
    assert len(data) < sum(item.nbytes for item in frames) / 3
    for item, received in zip(frames, decode_experience(data).segments, strict=True):
        assert_same_array(item, received.frames)
        assert not received.frames.flags.writeable


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float32", "int64", ">f4"])
def test_large_frames_of_any_dtype_come_back_equal(dtype):
    frames = (pictures() > 200).astype(dtype)
    received = decode_experience(sent(frames)).segments[0].frames
    np.testing.assert_array_equal(received, frames)
    assert received.dtype == frames.dtype.newbyteorder("=")


def test_small_frames_and_noise_are_sent_as_they_are():
    for shape in ((16,), (64, 64)):
        frames = np.random.default_rng(0).integers(0, 256, (9, *shape), np.uint8)
        assert frames.tobytes() in sent(frames)


def compressed_message(stream, frames=9, blocks=1, announced=1):
    values = [frames, 2, 0, 0, 0, 0, 0]
    block = [["uint8", [40, 40]], len(stream), ["int32", []], False, {}, [values]]
    padded = stream + bytes(-len(stream) % 8)
    body = padded + bytes(4 * (frames - 1)) * 2
    saved = announced * max(frames * 40 * 40 - len(stream), 0)
    return forged(1, msgspec.msgpack.encode(["a", 1, 1, [], [], [], [block] * blocks]), body * blocks, saved)


def test_forged_compressed_frames_are_refused():
    stream = zstandard.compress(pictures().tobytes())
    assert_same_array(decode_experience(compressed_message(stream)).segments[0].frames, pictures())
    bomb = zstandard.compress(bytes(2**30))
    assert len(bomb) < 2**20
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(pictures().tobytes())
    for wrong, says in [
        (bomb, "do not hold"),
        (unsized, "do not hold"),
        (stream[:-9], "damaged|do not hold"),
        (stream[:10] + bytes(30) + stream[40:], "damaged"),
        (stream + stream, "damaged"),
        (b"no stream at all", "damaged"),
    ]:
        with pytest.raises(ProtocolError, match=says):
            decode_experience(compressed_message(wrong))


def test_compressed_frames_hold_together_what_the_message_announces():
    stream = zstandard.compress(pictures().tobytes())
    received = decode_experience(compressed_message(stream, blocks=3, announced=3)).segments
    assert len(received) == 3
    for announced, says in [(2, "more in compressed frames"), (4, "less in compressed frames"), (10**6, "at most")]:
        with pytest.raises(ProtocolError, match=says):
            decode_experience(compressed_message(stream, blocks=3, announced=announced))


def test_a_message_tells_its_size_without_compression():
    frames = pictures()
    assert 0 < unpacked_bytes(sent(frames)) - (frames.nbytes + 8 * 8) < 200
    for message in (*(data for data, _ in MESSAGES), b"no message", b"SRL\xa7", sent(frames)[:4] + bytes(40)):
        assert unpacked_bytes(message) == len(message)


def test_frames_that_would_be_too_large_decompressed_are_refused_at_both_ends(monkeypatch):
    data = sent(pictures())
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4096)
    assert len(data) < 4096
    with pytest.raises(ProtocolError, match="above the limit"):
        sent(pictures())
    with pytest.raises(ProtocolError, match="at most 4096"):
        decode_experience(data)
