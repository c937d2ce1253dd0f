"""Training in lockstep: actors and trainer take fixed turns, so that a distributed run gives the same result twice."""

from collections import deque

from srl.base.errors import ProtocolError
from srl.runner.distribution.records import Message
from srl.runner.distribution.trainer_session import BLOCK_MS, MESSAGES_AT_ONCE, Snapshot, TrainerSession
from srl.runner.distribution.wire import decode_experience, encode_tree


class LockstepSession(TrainerSession):
    """Rounds in place of a free run, so that the same run gives the same result twice.

    Parameters learned from rounds up to `k` are published once every actor has sent round `k + 1`, hence plays round
    `k + 2` with them, while the learner does the updates that round `k + 1` allows.
    """

    def _learn(self) -> None:
        self._rounds: dict[str, deque[Message]] = {
            f"actor-{slot}": deque() for slot in range(self._run_config.actor_num)
        }
        trainer, after, restored = self._trainer, self._position.last, self._keeper.restored
        while not self._is_ending():
            parameters = encode_tree(trainer.parameters, {"train_count": trainer.train_count})
            while not (all(self._rounds.values()) or self._is_ending()):
                after = self._gather(after)
                self._give_snapshot()
                if restored != self._keeper.restored:
                    # A round may have been lost with the broker's data: let whoever waits for the next one play on.
                    restored = self._keeper.restored
                    self._commit(parameters)
            if self._is_ending():
                return
            self._commit(parameters)
            self._insert([messages.popleft() for messages in self._rounds.values()])
            self._commit()
            while not self._is_ending():
                updates = trainer.due(left := self._updates_left())
                if updates < min(left, trainer.dispatch):
                    break
                trainer.learn(updates)
                self._give_snapshot()

    def _gather(self, after: str) -> str:
        """Put messages that came after an id to their actors' rounds; returns the id of the last one."""
        messages = self._ask(lambda: self._broker.receive(self._lease.task, after, MESSAGES_AT_ONCE, BLOCK_MS)) or []
        for message in messages:
            try:
                sender = decode_experience(message.data).actor.partition("/")[0]
                if sender not in self._rounds:
                    raise ProtocolError(f"{sender!r:.80} has no place in rounds of {len(self._rounds)} actors")
            except ProtocolError as error:
                self._refuse(message, error)
                continue
            self._rounds[sender].append(message)
        return messages[-1].id if messages else after

    def _ingest(self) -> None:
        """Leave experience to the learning loop, which takes it in rounds."""

    def _publish_from_thread(self, snapshot: Snapshot) -> None:
        self._store(snapshot)
