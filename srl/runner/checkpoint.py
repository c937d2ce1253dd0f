"""Trees on disk: one parameter file, and directories of checkpoints that survive a crash at any moment.

The runner facade saves and loads parameters with it, the trainer writes checkpoints, and both resume from them.
Files are safetensors and JSON; reading one never runs code.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from srl.base.algorithm import Tree
from srl.base.errors import CheckpointError

_logger = logging.getLogger(__name__)

FORMAT = 1
"""Goes up with every change that an older reader would misread."""
KEEP = 5

_PARAMETERS, _LEARNER, _STATE, _CONFIG = "parameters.safetensors", "learner.safetensors", "state.json", "config.json"
_RUN = "run.safetensors"
"""Only where a run can go on exactly."""
_STEP = re.compile(r"(\d+)")
_REPLACED = re.compile(r"\.(\d+)\.replaced")
_UNFINISHED = re.compile(r"\.\d+\.\w+\.tmp")
_CHECKSUM_KEY, _SCALARS_KEY = "srl.crc32", "srl.scalars"


@dataclass(frozen=True)
class Checkpoint:
    """A run at one moment.

    Attributes:
        path: directory it was read from.
        train_count: updates done.
        parameters, learner_state: trees of arrays, scalars and text.
        state: JSON data of everything else: counters, random generators, versions.
        config: JSON data of the task's configuration.
        run_state: tree of what else an exact resume needs (open episodes, the memory's mark); empty where the
            checkpoint is not of a run in one process.
    """

    path: Path
    train_count: int
    parameters: dict[str, Any]
    learner_state: dict[str, Any]
    state: dict[str, Any]
    config: dict[str, Any]
    run_state: dict[str, Any]


def save_parameter(path: str | Path, tree: Tree, metadata: Mapping[str, str]) -> None:
    """Write a tree and some facts about it to one safetensors file, or leave an existing file as it is.

    Leaves are arrays of numbers or bool and Python `int`, `float`, `str`, `bool` and `None`; numpy scalars
    become arrays without dimensions. Raises `CheckpointError` for any other leaf or where the file cannot be written.
    """
    target = _local(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_tree(temporary, tree, metadata)
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"parameters could not be written to {target}: {error}") from error
    finally:
        if temporary.exists():
            temporary.unlink()


def load_parameter(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what `save_parameter` was given. Raises `CheckpointError` where the file is missing or damaged."""
    source = _local(path)
    if source.is_dir():
        raise CheckpointError(f"{source} is a directory; a parameter file is one .safetensors file")
    if not source.exists():
        raise CheckpointError(f"there is no parameter file {source}")
    try:
        return _read_tree(source)
    except _Damaged as error:
        raise CheckpointError(f"the parameter file {source} is damaged: {error}") from error


def save_checkpoint(
    directory: str | Path,
    *,
    train_count: int,
    parameters: Tree,
    learner_state: Tree,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    run_state: Tree | None = None,
    keep: int = KEEP,
) -> Path:
    """Write `<directory>/<train count>/` and return its path; one that is there already is replaced.

    A crash at any moment leaves the checkpoints before it readable. Only one process may write to a directory.

    Args:
        state, config: JSON data.
        run_state: a tree, see `Checkpoint`.
        keep: how many checkpoints stay; those with the lowest train counts go.

    Raises `CheckpointError` where something cannot be written.
    """
    root = _local(directory)
    target = root / str(train_count)
    temporary = root / f".{train_count}.{secrets.token_hex(4)}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        _write_tree(temporary / _PARAMETERS, parameters, {})
        _write_tree(temporary / _LEARNER, learner_state, {})
        if run_state:
            _write_tree(temporary / _RUN, run_state, {})
        _write_json(temporary / _CONFIG, config)
        files = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        document = {
            "format": FORMAT, "train_count": train_count, "versions": _versions(), "sha256": files, "state": state,
        }  # fmt: skip
        _write_json(temporary / _STATE, {**document, "state_sha256": _digest(document)})
        _sync(temporary)
        _move_into_place(temporary, target)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {target} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(root, target, keep)
    return target


def load_checkpoint(directory: str | Path) -> Checkpoint:
    """Return the newest valid checkpoint of a directory, or the one whose own directory is given.

    Damaged ones are reported in the log and skipped. Raises `CheckpointError` naming the path, and why each
    checkpoint in it cannot be used, where none is left.
    """
    root = _local(directory)
    if not root.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {root}")
    candidates = [path for _, path in _candidates(root)]
    if not candidates and any((root / name).exists() for name in (_STATE, _PARAMETERS, _LEARNER, _CONFIG)):
        candidates = [root]
    if not candidates:
        raise CheckpointError(f"there is no checkpoint in {root}")
    reasons = []
    for path in candidates:
        try:
            return _read_checkpoint(path)
        except _Damaged as error:
            reasons.append(f"{path}: {error}")
            _logger.warning("the checkpoint %s is skipped: %s", path, error)
    raise CheckpointError(f"no checkpoint in {root} can be used: {'; '.join(reasons)}")


def newest_above(directory: str | Path, train_count: int) -> int | None:
    """Return the train count of the newest valid checkpoint above `train_count` in a directory, `None` without one."""
    root = _local(directory)
    for count, path in _candidates(root) if root.is_dir() else ():
        if count <= train_count:
            break
        with contextlib.suppress(_Damaged):
            _read_checkpoint(path)
            return count
    return None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in a `CheckpointError` that is raised while its contents are put to use."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


class _Damaged(Exception):
    """A file does not hold what was written to it."""


def _local(path: str | Path) -> Path:
    if re.match(r"[a-z0-9]+://", str(path)):
        raise CheckpointError(f"{path}: checkpoints can be on local paths only")
    return Path(path).expanduser()


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Return checkpoint directories, newest first; a replaced one counts until its removal is complete."""
    found = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, key=lambda item: (item[0], not item[1].name.startswith(".")), reverse=True)


def _remove_leftovers(root: Path) -> None:
    for path in list(root.iterdir()):
        if replaced := _REPLACED.fullmatch(path.name):
            target = root / replaced[1]
            if target.exists():
                shutil.rmtree(path)
            else:
                path.rename(target)  # The crash came between the two renames of a replacement.
        elif _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)


def _move_into_place(temporary: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _prune(root: Path, written: Path, keep: int) -> None:
    others = [path for _, path in _candidates(root) if path != written]
    for path in others[max(keep, 1) - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _read_checkpoint(path: Path) -> Checkpoint:
    document = _read_json(path / _STATE)
    found = document.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise _Damaged(f"it has format {found}, this version of SRL reads up to {FORMAT}; use a newer SRL")
    if document.pop("state_sha256", None) != _digest(document):
        raise _Damaged(f"{_STATE} was changed after it was written")
    try:
        train_count, state, files = document["train_count"], document["state"], document["sha256"]
        expected = {name: files[name] for name in (_PARAMETERS, _LEARNER, _CONFIG)}
        expected |= {name: files[name] for name in (_RUN,) if name in files}
    except (KeyError, TypeError) as error:
        raise _Damaged(f"{_STATE} lacks {error}") from error
    for name, checksum in expected.items():
        if _sha256(path / name) != checksum:
            raise _Damaged(f"{name} was changed after it was written")
    parameters, _ = _read_tree(path / _PARAMETERS)
    learner_state, _ = _read_tree(path / _LEARNER)
    run_state = _read_tree(path / _RUN)[0] if _RUN in expected else {}
    return Checkpoint(path, train_count, parameters, learner_state, state, _read_json(path / _CONFIG), run_state)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("srl", "numpy", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest(document: Mapping[str, Any]) -> str:
    """Return a checksum of JSON data that is the same before writing and after reading."""
    text = json.dumps(json.loads(json.dumps(document)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise _Damaged(f"{path.name} is missing") from error
    except OSError as error:
        raise _Damaged(f"{path.name} cannot be read ({error})") from error


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    _sync(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _Damaged(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _Damaged(f"{path.name} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise _Damaged(f"{path.name} is no JSON object")
    return data


def _write_tree(path: Path, tree: Tree, metadata: Mapping[str, str]) -> None:
    arrays: dict[str, np.ndarray] = {}
    scalars: dict[str, Any] = {}
    for name, value in _flatten(tree, ""):
        if hasattr(value, "__array__") and name != "__metadata__":  # which safetensors keeps for itself
            arrays[name] = _as_plain_array(name, value)
        elif value is None or isinstance(value, (bool, int, float, str)) or value == {}:
            scalars[name] = value
        else:
            raise CheckpointError(f"the tree's leaf {name!r} cannot be written: {type(value).__name__} {value!r:.80}")
    for key, text in metadata.items():
        if not isinstance(text, str) or key in (_CHECKSUM_KEY, _SCALARS_KEY):
            raise CheckpointError(f"metadata is text under any key but {_CHECKSUM_KEY} and {_SCALARS_KEY}: {key!r}")
    described = {**metadata, _SCALARS_KEY: json.dumps(scalars)}
    described[_CHECKSUM_KEY] = _crc32(arrays, described)
    try:
        safetensors.numpy.save_file(arrays, path, described)
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    _sync(path)


def _read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise _Damaged(f"{path.name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise _Damaged(f"{path.name} cannot be read ({error})") from error
    checksum = metadata.pop(_CHECKSUM_KEY, None)
    if checksum is not None and checksum != _crc32(arrays, metadata):
        raise _Damaged(f"{path.name} was changed after it was written")
    try:
        scalars = json.loads(metadata.pop(_SCALARS_KEY, "{}"))
        return _unflatten({**arrays, **scalars}), metadata
    except (ValueError, TypeError, RecursionError) as error:
        raise _Damaged(f"{path.name} holds no tree ({error})") from error


def _as_plain_array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise CheckpointError(f"the tree's leaf {name!r} has dtype {array.dtype}, which is not written; cast it")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _crc32(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Return a checksum of everything in a file, as safetensors has none."""
    checksum = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), checksum)
        if array.size:
            checksum = zlib.crc32((array if sys.byteorder == "little" else array.byteswap()).data, checksum)
    return f"{checksum:08x}"


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if not isinstance(key, str):
            raise CheckpointError(f"keys of trees are text, not {key!r}")
        name = prefix + key.replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}/")
        else:
            yield name, {} if isinstance(value, Mapping) else value


def _unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = [part.replace("%2F", "/").replace("%25", "%") for part in name.split("/")]
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name!r} is below a leaf")
        if last in node:
            raise ValueError(f"{name!r} is there twice")
        node[last] = value
    return tree


def _sync(path: Path) -> None:
    """Make a file's or a directory's contents survive a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if os.name == "nt" and path.is_dir():
            return  # Windows cannot open directories.
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
