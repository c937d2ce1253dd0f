import numpy as np
import pytest

from srl.base.segment import End, Segment, overlap


def segment(steps: int, end: End, context: int = 0) -> Segment:
    return Segment(
        frames=np.zeros((steps + 1, 2)),
        actions=np.zeros(steps, np.int32),
        rewards=np.zeros(steps, np.float32),
        end=end,
        context=context,
        lane=0,
        sequence=0,
        version=0,
    )


@pytest.mark.parametrize(
    ("steps", "end", "context", "n_step", "starts"),
    [
        (3, End.TERMINATED, 0, 1, [0, 1, 2]),
        (3, End.TERMINATED, 0, 3, [0, 1, 2]),
        (1, End.TRUNCATED, 0, 5, [0]),
        (3, End.CUT, 0, 1, [0, 1, 2]),
        (5, End.CUT, 0, 3, [0, 1, 2]),
        (6, End.CUT, 3, 3, [3]),
        (6, End.TRUNCATED, 3, 3, [3, 4, 5]),
        (2, End.CUT, 0, 5, []),
    ],
)
def test_which_steps_start_a_transition(steps: int, end: End, context: int, n_step: int, starts: list[int]) -> None:
    assert list(segment(steps, end, context).transitions(n_step)) == starts


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_cut_leaves_just_what_the_next_segment_repeats(window: int, n_step: int) -> None:
    first = segment(20, End.CUT)
    kept = overlap(window, n_step)
    after = segment(kept - 1 + 5, End.TERMINATED, context=window - 1)
    offset = 20 + 1 - kept
    starts = [*first.transitions(n_step), *(offset + step for step in after.transitions(n_step))]
    assert starts == list(range(25))
