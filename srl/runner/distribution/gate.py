"""What a trainer asks of each experience message before its memory takes it: actors' machines are not trusted.

`wire` has checked that a message can be read; this checks that it is play of this task. What passes may still be bad
play, which an actor with a password can always send, but it cannot end the run, and what is learned from is finite.
"""

import math
import re
from collections.abc import Mapping

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
        self._spaces = spaces
        self._memory = memory
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
        for segment in experience.segments:
            self._check_segment(segment)
        try:
            self._memory.check(experience.segments)
        except SpaceError as error:
            raise ProtocolError(str(error)) from error
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

    def _check_segment(self, segment: Segment) -> None:
        frames, actions, wanted = segment.frames, segment.actions, self._spaces.action
        if len(frames) > self._most_frames:
            raise ProtocolError(f"a segment has {len(frames)} frames, more than {self._most_frames}")
        shape, dtype = ((), "int32") if isinstance(wanted, DiscreteActions) else ((len(wanted.low),), "float32")
        if actions.shape[1:] != shape or actions.dtype != dtype:
            raise ProtocolError(f"its actions are {list(actions.shape[1:])} {actions.dtype}, not {list(shape)} {dtype}")
        if isinstance(wanted, DiscreteActions):
            if len(actions) and not 0 <= actions.min() <= actions.max() < wanted.count:
                raise ProtocolError(f"an action is none of {wanted.count}")
        elif not np.isfinite(actions).all():
            raise ProtocolError("an action is not finite")
        if not np.isfinite(segment.rewards).all():
            raise ProtocolError("a reward is not finite")
        if frames.dtype.kind == "f" and not np.isfinite(frames).all():
            raise ProtocolError("an observation is not finite")
        if segment.priorities is not None and np.isinf(segment.priorities).any():
            raise ProtocolError("a priority is infinite")
