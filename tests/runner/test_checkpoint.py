import json
import logging
import shutil

import numpy as np
import pytest

from srl.base.errors import CheckpointError
from srl.runner import checkpoint
from srl.runner.checkpoint import load_checkpoint, load_parameter, save_checkpoint, save_parameter

FILES = ["parameters.safetensors", "learner.safetensors", "state.json", "config.json"]


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "params": {"dense/0": {"kernel": rng.standard_normal((3, 4)).astype(np.float32), "bias": np.zeros(4)}},
        "opt": {"count": np.array(2**62 + seed, np.int64), "empty": {}, "half": np.float16(0.5)},
        "key": np.array([seed, 2**32 - 1], np.uint32),
        "mask": np.array([True, False]),
        "none": np.zeros((0, 3), np.uint8),
        "100%": {"%2F": 1, "": "text é", "nothing": None, "flag": True, "float": 0.1, "rng": 2**127 + 1},
    }


def assert_same(left, right):
    assert set(left) == set(right)
    for key, value in left.items():
        if isinstance(value, dict):
            assert_same(value, right[key])
        elif isinstance(value, (np.ndarray, np.generic)):
            assert right[key].dtype == value.dtype and right[key].shape == value.shape
            assert right[key].tobytes() == value.tobytes()
        else:
            assert type(right[key]) is type(value) and right[key] == value


def save(directory, train_count, **changes):
    arguments = {
        "parameters": {"w": np.full(3, train_count, np.float32)},
        "learner_state": tree(train_count),
        "state": {"env_steps": 4 * train_count, "rng": {"state": 2**100}, "rate": 0.1},
        "config": {"algorithm": "dqn", "layers": [64, 64]},
    }
    return save_checkpoint(directory, train_count=train_count, **arguments | changes)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(bytes(data))


# Parameter files


def test_parameters_come_back_equal(tmp_path):
    path = tmp_path / "deep" / "er" / "p.safetensors"
    save_parameter(path, tree(), {"algorithm": "dqn", "note": "é"})
    loaded, metadata = load_parameter(str(path))
    assert_same(tree(), loaded)
    assert metadata == {"algorithm": "dqn", "note": "é"}
    assert names(path.parent) == ["p.safetensors"]


def test_strided_and_big_endian_arrays_keep_their_values(tmp_path):
    arrays = {"t": np.arange(6.0).reshape(2, 3).T, "s": np.arange(10)[::3], "b": np.arange(3, dtype=">i4")}
    save_parameter(tmp_path / "p", arrays, {})
    loaded, _ = load_parameter(tmp_path / "p")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_an_empty_tree_comes_back(tmp_path):
    save_parameter(tmp_path / "p", {}, {})
    assert load_parameter(tmp_path / "p") == ({}, {})


def test_files_of_other_programs_can_be_read(tmp_path):
    import safetensors.numpy

    safetensors.numpy.save_file({"a/b": np.arange(3)}, tmp_path / "p", {"format": "np"})
    loaded, metadata = load_parameter(tmp_path / "p")
    np.testing.assert_array_equal(loaded["a"]["b"], np.arange(3))
    assert metadata == {"format": "np"}


def test_every_changed_byte_and_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "p.safetensors"
    small = {"w": np.arange(4, dtype=np.float32), "n": 3}
    save_parameter(path, small, {"algorithm": "dqn"})
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"p\.safetensors is damaged"):
            load_parameter(path)
    for position in range(len(data)):
        path.write_bytes(data)
        flip(path, position)
        try:
            loaded, metadata = load_parameter(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            # Only what means nothing may change unnoticed: spaces that pad the header, and the checksum's own
            # name, without which a file counts as another program's.
            np.testing.assert_array_equal(loaded["w"], small["w"])
            assert metadata["algorithm"] == "dqn"


def test_missing_parameter_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"no parameter file {tmp_path}/none"):
        load_parameter(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_parameter(tmp_path)


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "p"
    save_parameter(path, {"w": np.ones(2)}, {})
    for bad in (
        {"w": np.array([None])},
        {"w": [1]},
        {1: 2},
        {"w": np.zeros(1, np.complex64)},
        {"__metadata__": np.ones(1)},
    ):
        with pytest.raises(CheckpointError):
            save_parameter(path, bad, {})
    with pytest.raises(CheckpointError, match="metadata is text"):
        save_parameter(path, {}, {"a": 1})
    assert load_parameter(path)[0]["w"].sum() == 2
    assert names(tmp_path) == ["p"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file/p"):
        save_parameter(tmp_path / "file" / "p", {}, {})
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", 1)


# Checkpoint directories


def test_a_checkpoint_comes_back_equal(tmp_path):
    path = save(tmp_path / "new" / "c", 100)
    assert path == tmp_path / "new" / "c" / "100"
    assert names(path) == sorted(FILES)
    for given in (path.parent, str(path.parent), path):
        loaded = load_checkpoint(given)
        assert (loaded.path, loaded.train_count) == (path, 100)
        assert_same({"w": np.full(3, 100, np.float32)}, loaded.parameters)
        assert_same(tree(100), loaded.learner_state)
        assert loaded.state == {"env_steps": 400, "rng": {"state": 2**100}, "rate": 0.1}
        assert loaded.config == {"algorithm": "dqn", "layers": [64, 64]}


def test_the_files_are_what_they_are_said_to_be(tmp_path):
    path = save(tmp_path, 100)
    assert load_parameter(path / "parameters.safetensors")[0]["w"][0] == 100
    state = json.loads((path / "state.json").read_text())
    assert state["versions"]["python"] and set(state["sha256"]) == set(FILES) - {"state.json"}
    assert json.loads((path / "config.json").read_text())["algorithm"] == "dqn"


def test_the_newest_counts_by_number(tmp_path):
    for train_count in (9, 100, 20):
        save(tmp_path, train_count)
    (tmp_path / "999.txt").write_text("not a checkpoint")
    (tmp_path / "notes").mkdir()
    assert load_checkpoint(tmp_path).train_count == 100
    assert load_checkpoint(tmp_path / "9").train_count == 9


def test_old_ones_are_removed(tmp_path):
    for train_count in range(1, 9):
        save(tmp_path, train_count)
    assert names(tmp_path) == ["4", "5", "6", "7", "8"]
    save(tmp_path, 9, keep=2)
    assert names(tmp_path) == ["8", "9"]


def test_the_one_just_written_stays_whatever_is_there(tmp_path):
    for train_count in (100, 200):
        save(tmp_path, train_count)
    path = save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["3"] and load_checkpoint(path).train_count == 3


def test_the_same_train_count_again_replaces(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 5, state={"again": True})
    assert load_checkpoint(tmp_path).state == {"again": True}
    assert names(tmp_path) == ["5"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(tmp_path, caplog, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    if damage == "flip":
        flip(file)
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING, "srl"):
        assert load_checkpoint(tmp_path).train_count == 1
    assert len(caplog.records) == 1
    assert str(tmp_path / "2") in caplog.text and name in caplog.text
    with pytest.raises(CheckpointError, match=f"{tmp_path / '2'}.*{name}"):
        load_checkpoint(tmp_path / "2")


def test_every_changed_byte_of_the_state_is_noticed(tmp_path):
    file = save(tmp_path, 2) / "state.json"
    data = file.read_bytes()
    expected = load_checkpoint(tmp_path)
    for position in range(len(data)):
        file.write_bytes(data)
        flip(file, position)
        try:
            loaded = load_checkpoint(tmp_path)
        except CheckpointError:
            continue
        assert (loaded.state, loaded.train_count) == (expected.state, expected.train_count)  # white space only


def test_reasons_are_given_for_each_one(tmp_path):
    flip(save(tmp_path, 1) / "learner.safetensors")
    (save(tmp_path, 2) / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert f"{tmp_path / '1'}: learner.safetensors was changed" in message
    assert f"{tmp_path / '2'}: config.json is missing" in message


def test_a_newer_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 7)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"format 7.*up to {checkpoint.FORMAT}"):
        load_checkpoint(tmp_path)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint directory {tmp_path}/none"):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        load_checkpoint(tmp_path)


def test_urls_are_refused_and_make_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (lambda: save("gs://bucket/run", 1), lambda: load_checkpoint("s3://bucket/run")):
        with pytest.raises(CheckpointError, match="local paths"):
            use()
    assert names(tmp_path) == []


def test_a_crash_while_writing_leaves_the_ones_before(tmp_path, monkeypatch):
    """Killed after any file: what is there stays readable, and the next write removes what was left over."""
    save(tmp_path, 1)
    for written in range(len(FILES)):
        unfinished = tmp_path / f".2.abc{written}.tmp"
        unfinished.mkdir()
        for name in FILES[:written]:
            shutil.copy(tmp_path / "1" / name, unfinished)
        assert load_checkpoint(tmp_path).train_count == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["1", "3"]


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    save(tmp_path, 1)
    for bad in ({"state": {"a": object()}}, {"learner_state": {"a": [1]}}, {"config": {"a": {1, 2}}}):
        with pytest.raises(CheckpointError):
            save(tmp_path, 2, **bad)
    assert names(tmp_path) == ["1"]
    assert load_checkpoint(tmp_path).train_count == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_replacing_loses_nothing(tmp_path, monkeypatch, renames):
    save(tmp_path, 1)
    save(tmp_path, 2, state={"old": True})
    rename, left = type(tmp_path).rename, [renames]

    def failing(path, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return rename(path, target)

    # What a killed process leaves: no clean-up of its own runs.
    monkeypatch.setattr(type(tmp_path), "rename", failing)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(Killed):
        save(tmp_path, 2, state={"new": True})
    monkeypatch.undo()
    assert any(name.endswith(".tmp") for name in names(tmp_path))
    loaded = load_checkpoint(tmp_path)
    assert loaded.train_count == 2 and loaded.state == {"old": True}
    save(tmp_path, 3)
    assert names(tmp_path) == ["1", "2", "3"]
    assert load_checkpoint(tmp_path / "2").state == {"old": True}
