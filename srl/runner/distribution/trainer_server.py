"""A trainer serving one task: everything is made ready here, then a session trains."""

import json
import logging
import threading
from pathlib import Path

from srl.base.spaces import Spaces
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.gate import Gate
from srl.runner.distribution.keeper import Heartbeat, TaskKeeper
from srl.runner.distribution.lockstep import LockstepSession
from srl.runner.distribution.outages import persist
from srl.runner.distribution.records import Lease, TaskDefinition
from srl.runner.distribution.trainer_session import TrainerSession
from srl.runner.distribution.wire import decode_tree
from srl.runner.plugins import config_from_dict
from srl.runner.trainer import Trainer

logger = logging.getLogger("srl")


def serve_trainer(
    broker: Broker, lease: Lease, definition: TaskDefinition, directory: Path | None, stop: threading.Event
) -> bool:
    """Train one task until it is done, the lease is lost or `stop` is set; returns whether it is done.

    Args:
        directory: for the memory's files, or `None`.
    """
    committed = persist(lambda: broker.committed(lease.task), broker, stop)
    found = persist(lambda: broker.checkpoint_blob(lease.task), broker, stop)
    if committed is None or found is None:
        return False
    _, checkpoint = found
    keeper = TaskKeeper(broker, lease, definition, committed, checkpoint or b"", directory, stop)
    with Heartbeat(keeper, "its memory and its network to be ready"):
        config = config_from_dict(definition.rl)
        spaces, seed = Spaces.from_dict(definition.spaces), int(definition.run["seed"])
        logger.info("trainer: %s", config.preflight(spaces, directory))
        memory = keeper.memory = config.make_memory(spaces, seed, directory)
        learner, in_lockstep = config.make_learner(spaces, seed), bool(definition.run.get("lockstep"))
        prefetch = learner.has_accelerator and not in_lockstep
        trainer = Trainer(config, spaces, learner, memory, distributed=True, prefetch=prefetch)
        trainer.prepare()
        if checkpoint is not None:
            tree, metadata = decode_tree(checkpoint)
            trainer.learner.set_state(tree["learner"])
            state = json.loads(str(metadata["state"]))
            if "limiter" in state:
                trainer.set_state(state)
                # Data that came after this checkpoint is there; the updates on it are done again.
                trainer.count(committed.progress.get("env_steps", 0) - state["env_steps"])
        if checkpoint is not None or committed.version:
            logger.info("trainer: task %s goes on at %d updates", lease.task, trainer.train_count)
    session = LockstepSession if in_lockstep else TrainerSession
    gate = Gate(config, spaces, memory, int(definition.run["num_envs"]))
    return session(keeper, trainer, gate, config.n_step_frames, committed, stop).run()
