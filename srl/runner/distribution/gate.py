"""What a trainer asks of each experience message before its memory takes it: actors' machines are not trusted.

`wire` has checked that a message can be read; this checks that it is play of this task. What passes may still be bad
play, which an actor with a password can always send, but it cannot end the run, and what is learned from is finite.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from srl.base.algorithm import Memory, RLConfig
from srl.base.errors import ProtocolError, SpaceError
from srl.base.segment import Segment
from srl.base.spaces import DiscreteActions, Spaces
from srl.runner.distribution.wire import Experience

_SENDER = re.compile(r"actor-[0-9]{1,5}/[0-9]{1,18}:[0-9a-f]{1,32}")
MOST_LOST = 1_000_000
"""Messages that an actor may have lost at once; a number further on is none that it counted to."""


class Gate:
    """Refuses what is no play of this task.

    Args:
        lanes: env lanes of an actor.
    """

    def __init__(self, config: RLConfig, spaces: Spaces, memory: Memory, lanes: int) -> None:
        self._memory = memory
        self._action = action = spaces.action
        self._actions = ((), np.dtype(np.int32)) if isinstance(action, DiscreteActions) else (
            (len(action.low),), np.dtype(np.float32)
        )  # fmt: skip
        self._may_be_infinite = np.dtype(spaces.observation.dtype).kind == "f"
        steps = config.steps_per_segment(spaces)
        self._most_frames = steps + config.window_length + config.n_step_frames + 1
        self._most_steps_aside = 2 * lanes * steps

    def check(self, experience: Experience, sequences: Mapping[str, int]) -> None:
        """Raise `ProtocolError` that says what is wrong with a message.

        Args:
            sequences: newest sequence number by sender.
        """
        if not _SENDER.fullmatch(experience.actor):
            raise ProtocolError(f"its sender calls itself {experience.actor!r:.80}")
        if experience.sequence > sequences.get(experience.actor, -1) + MOST_LOST:
            raise ProtocolError(f"it says to be message number {experience.sequence}")
        if experience.segments:
            try:
                self._memory.check(experience.segments)
            except SpaceError as error:
                raise ProtocolError(str(error)) from error
            self._check_values(experience.segments)
        # Steps are counted as they are played, some before their segment is whole.
        steps = sum(len(segment.actions) for segment in experience.segments)
        if experience.env_steps > steps + self._most_steps_aside:
            raise ProtocolError(f"it counts {experience.env_steps} env steps, with {steps} in its segments")
        episodes = len(experience.episode_rewards)
        if episodes > steps + self._most_steps_aside or episodes != len(experience.episode_lengths):
            raise ProtocolError(f"it tells of {episodes} episodes of {len(experience.episode_lengths)} lengths")
        told = [*experience.episode_rewards, *(record.mean_reward for record in experience.evaluations)]
        if not all(math.isfinite(reward) for reward in told):
            raise ProtocolError("an episode's reward is not finite")

    def _check_values(self, segments: Sequence[Segment]) -> None:
        longest = max(len(segment.frames) for segment in segments)
        if longest > self._most_frames:
            raise ProtocolError(f"a segment has {longest} frames, more than {self._most_frames}")
        for shape, dtype in {(segment.actions.shape[1:], segment.actions.dtype) for segment in segments}:
            if (shape, dtype) != self._actions:
                raise ProtocolError(
                    f"its actions are {list(shape)} {dtype}, not {list(self._actions[0])} {self._actions[1]}"
                )
        actions = np.concatenate([segment.actions for segment in segments])
        if isinstance(self._action, DiscreteActions):
            if actions.size and actions.view(np.uint32).max() >= self._action.count:  # negative ones are large then
                raise ProtocolError(f"an action is none of {self._action.count}")
        elif not _are_finite(actions):
            raise ProtocolError("an action is not finite")
        if not all(_are_finite(segment.rewards) for segment in segments):
            raise ProtocolError("a reward is not finite")
        if self._may_be_infinite and not all(_are_finite(segment.frames) for segment in segments):
            raise ProtocolError("an observation is not finite")


def _are_finite(values: np.ndarray) -> bool:
    # A sum of squares is quick, and finite for all but very large numbers.
    return math.isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())
