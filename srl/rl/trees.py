"""Trees of arrays by path, and the check that a stored tree fits: learners and policies load through it."""

from collections.abc import Iterator, Mapping
from typing import Any

from srl.base.errors import CheckpointError


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each array of a tree under its path, such as `parameters/Dense_0/kernel`."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def check_matches(tree: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` naming the first array that is missing, too many, or of another shape or dtype."""
    found, wanted = dict(flatten(tree)), dict(flatten(expected))
    why = "it was made with other settings or for another env"
    for path, array in wanted.items():
        if path not in found:
            raise CheckpointError(f"{path} is missing from the stored state; {why}")
        if tuple(found[path].shape) != tuple(array.shape):
            raise CheckpointError(
                f"{path} has shape {tuple(found[path].shape)} where {tuple(array.shape)} is needed; {why}"
            )
        if found[path].dtype != array.dtype:
            raise CheckpointError(f"{path} has dtype {found[path].dtype} where {array.dtype} is needed; {why}")
    for path in found:
        if path not in wanted:
            raise CheckpointError(f"{path} of the stored state is not known here; {why}")
