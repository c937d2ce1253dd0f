"""DQN: deep Q-learning for discrete actions, with the improvements that became standard.

Read it from top to bottom: config, network, loss, learner, policy. A runner makes the config's policy in
actors and evaluators, its learner and memory in the trainer. JAX is imported inside functions only: a
config must be made, checked and sent without it. See docs/algorithms/dqn.md.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from srl.base.algorithm import Exploration, Memory, RLConfig, Step, Tree, UpdateInfo
from srl.base.errors import ConfigError
from srl.base.processor import Processor
from srl.base.segment import End, overlap
from srl.base.settings import setting
from srl.base.spaces import Spaces, is_image
from srl.rl.blocks import HiddenBlock, ImageBlock
from srl.rl.exploration import epsilon_greedy, ladder
from srl.rl.memories.config import MemoryConfig
from srl.rl.processors.image_processor import ImageProcessor
from srl.rl.schedules import Schedule
from srl.rl.trees import check_matches

if TYPE_CHECKING:
    import jax

    from srl.rl.networks import QNetwork

REWARD_CLIP = (-1.0, 1.0)
EPSILON_IN_ONE_PROCESS = 0.1
IMAGE_SIZE = (84, 84)
UPDATES_PER_DISPATCH, IMAGE_UPDATES_PER_DISPATCH = 16, 4


# --- config -----------------------------------------------------------------------------------------------


@dataclass
class Config(RLConfig, algorithm="dqn"):
    """Settings of DQN."""

    batch_size: int = setting(
        32, low=1, doc="transitions an update learns from; large is steadier for each update and slower"
    )
    target_model_update_interval: int = setting(
        1000, low=1, doc="updates between copies of the network to the target; low is fast and less stable"
    )
    discount: float = setting(0.99, low=0, high=1, doc="value of a reward one step later, 0 to 1; high looks far ahead")
    lr: Schedule = setting(
        factory=lambda: Schedule("constant", 0.001),
        doc="Adam's learning rate over train count; high learns fast and may diverge",
    )
    enable_reward_clip: bool = setting(
        False, doc="clip each reward to [-1, 1] for learning; reported episode rewards stay as they are"
    )
    enable_double_dqn: bool = setting(
        True, doc="the network chooses the target's action, not the target network; less overestimation"
    )
    enable_rescale: bool = setting(
        False, doc="learn values in the space of h(x) = sign(x)(sqrt(|x| + 1) - 1) + 0.001 x; for large returns"
    )
    memory: MemoryConfig = setting(factory=MemoryConfig, doc="the replay memory; see srl.rl.memories.config")
    hidden_block: HiddenBlock = setting(factory=HiddenBlock, doc="the network's hidden layers")
    image_block: ImageBlock = setting(factory=ImageBlock, doc="the network's layers for images, before the hidden ones")
    epsilon: Schedule = setting(
        factory=Schedule,
        doc="probability of a uniform action, 0 to 1, over train count, in every env lane; unset: actors "
        f"apart from the trainer use the Ape-X ladder 0.4 ** (1 + 7 i / (N - 1)), one process uses "
        f"{EPSILON_IN_ONE_PROCESS}; low explores little",
    )
    n_step: int = setting(
        3, low=1, high=100, doc="rewards summed before bootstrapping; high spreads rewards fast, with more noise"
    )
    huber_delta: float | None = setting(
        None, above=0, doc="TD error beyond which the loss is linear; low limits outliers. None: squared loss"
    )
    updates_per_dispatch: int | None = setting(
        None,
        low=1,
        high=1024,
        doc="updates sampled and done at once; high is fast for small networks, and priorities lag by that many. "
        f"None: {UPDATES_PER_DISPATCH}, for images {IMAGE_UPDATES_PER_DISPATCH}",
    )

    def validate(self) -> None:
        """Raise `ConfigError` where settings contradict each other."""
        super().validate()
        self.memory.check_batch(self.batch_size)
        low, high = self.epsilon.bounds
        if self.epsilon.is_set and not 0 <= low <= high <= 1:
            raise ConfigError(f"dqn.Config.epsilon must stay within 0 and 1, not go from {low:g} to {high:g}")
        if not self.lr.is_set or self.lr.bounds[0] < 0:
            raise ConfigError("dqn.Config.lr must be set and never be negative, for example lr=0.001")

    @property
    def n_step_frames(self) -> int:
        """How many frames after its first one a transition reaches."""
        return self.n_step

    def default_processors(self, observation_space: gymnasium.Space[Any]) -> list[Processor]:
        """Return what makes pictures small and grey: as they are in DQN (Mnih et al. 2015), if they are larger."""
        if not is_image(observation_space):
            return []
        shape = observation_space.shape or ()
        is_large = max(shape[:2]) > max(IMAGE_SIZE)
        is_color = shape[2:] == (3,)
        return [ImageProcessor(resize=IMAGE_SIZE if is_large else None)] if is_large or is_color else []

    def check_spaces(self, spaces: Spaces) -> None:
        """Raise `SpaceError` where the network cannot be made for such observations or actions."""
        self.image_block.applies_to(spaces.observation)

    def dispatch_size(self, spaces: Spaces) -> int:
        """Return how many updates are sampled and done at once."""
        if self.updates_per_dispatch is not None:
            return self.updates_per_dispatch
        is_image = self.image_block.applies_to(spaces.observation)
        return IMAGE_UPDATES_PER_DISPATCH if is_image else UPDATES_PER_DISPATCH

    def preflight(self, spaces: Spaces, directory: Path | None) -> str:
        """Return what the memory, the wire and the device need; `ConfigError` where the memory does not fit."""
        import jax

        from srl.rl import networks
        from srl.rl.memories.sizes import check_fits

        steps, n_step = self.steps_per_segment(spaces), self.n_step
        memory_bytes = check_fits(spaces, self.memory, n_step=n_step, segment_length=steps, directory=directory)
        frames = (steps + 1) / (steps + 1 - overlap(spaces.window_length, n_step))  # sent for each transition
        network = make_network(self, spaces, learning=False)  # which leaves the accelerator to the trainer
        parameters = jax.eval_shape(lambda: networks.first_parameters(network, spaces, seed=0))
        # Parameters, target, Adam's two moments, and the gradient; the batches of one dispatch.
        network_bytes = 5 * sum(4 * leaf.size for leaf in jax.tree.leaves(parameters))
        stack_bytes = spaces.window_length * spaces.observation.nbytes
        batch_bytes = self.dispatch_size(spaces) * self.batch_size * 2 * stack_bytes
        wire_bytes = (spaces.observation.nbytes + 16) * frames
        place = "of memory" if directory is None else f"in {directory}"
        return (
            f"needs {memory_bytes / 1e6:,.0f} MB {place} for {self.memory.capacity:,} transitions, at most "
            f"{wire_bytes:,.0f} bytes on the wire for each, {(network_bytes + batch_bytes) / 1e6:,.0f} MB on the "
            "device for network and batches"
        )

    def make_policy(self, spaces: Spaces) -> "DqnPolicy":
        """Return what an actor or an evaluator runs."""
        return DqnPolicy(self, spaces)

    def make_learner(self, spaces: Spaces, seed: int) -> "DqnLearner":
        """Return what a trainer runs; its first parameters follow from `seed`."""
        return DqnLearner(self, spaces, seed)

    def make_memory(self, spaces: Spaces, seed: int, directory: Path | None) -> Memory:
        """Return the replay memory, in files under `directory` or in plain memory where that is `None`."""
        from srl.rl.memories.replay import ReplayMemory

        return ReplayMemory(
            spaces,
            self.memory,
            batch_size=self.batch_size,
            n_step=self.n_step,
            discount=self.discount,
            updates_per_dispatch=self.dispatch_size(spaces),
            segment_length=self.steps_per_segment(spaces),
            reward_clip=REWARD_CLIP if self.enable_reward_clip else None,
            seed=seed,
            directory=directory,
        )


# --- network ----------------------------------------------------------------------------------------------


def make_network(config: Config, spaces: Spaces, *, learning: bool) -> "QNetwork":
    """Return the network that gives action values `[..., A]` for stacked frames `[..., window, *frame]`."""
    from srl.rl import networks

    return networks.q_network(spaces, config.hidden_block, config.image_block, learning=learning)


# --- loss -------------------------------------------------------------------------------------------------


def make_loss(config: Config, network: "QNetwork") -> Callable[..., tuple["jax.Array", dict[str, "jax.Array"]]]:
    """Return `loss(parameters, target, batch)`: the loss of a batch, and TD errors `[B]` and values `[B, A]`."""
    from srl.rl import losses
    from srl.rl.networks import q_values

    def loss(parameters: Tree, target: Tree, batch: Mapping[str, "jax.Array"]) -> Any:
        q_tm1 = q_values(network, parameters, batch["observation_tm1"])
        q_t = q_values(network, target, batch["observation_t"])
        selector = q_values(network, parameters, batch["observation_t"]) if config.enable_double_dqn else q_t
        td_error = losses.double_q_learning(
            q_tm1,
            batch["action_tm1"],
            batch["reward_t"],
            batch["discount_t"],
            q_t,
            selector,
            rescale=config.enable_rescale,
        )
        if config.huber_delta is None:
            each = losses.squared_loss(td_error)
        else:
            each = losses.huber_loss(td_error, config.huber_delta)
        return losses.weighted_mean(each, batch["weight"]), {"td_error": td_error, "q": q_tm1}

    return loss


# --- learner ----------------------------------------------------------------------------------------------


def make_updates(config: Config, network: "QNetwork", optimizer: Any) -> Callable[..., Any]:
    """Return the jitted function that does the first `count` updates of batches `[K, B, ...]`.

    It returns the new state, absolute TD errors `[K, B]`, and sums of loss, action value and absolute TD
    error over the updates. `count` is an argument of the compiled loop, so that one compilation serves every
    number of updates; batches of one update need no loop. Nothing is donated: published parameters stay valid.
    """
    import jax
    import jax.numpy as jnp

    gradient = jax.value_and_grad(make_loss(config, network), has_aux=True)
    interval = config.target_model_update_interval

    def updates(state: Tree, batches: Tree, learning_rates: Any, count: Any, since_copy: Any) -> Any:
        def update(k: Any, carry: Any) -> Any:
            state, td_errors, sums = carry
            batch = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, k, keepdims=False), batches)
            (loss, aux), gradients = gradient(state["parameters"], state["target"], batch)
            steps, adam = optimizer.update(gradients, state["optimizer"])
            parameters = jax.tree.map(lambda p, step: p - learning_rates[k] * step, state["parameters"], steps)
            is_copy = (since_copy + k + 1) % interval == 0
            target = jax.lax.cond(is_copy, lambda: parameters, lambda: state["target"])
            td_error = jnp.abs(aux["td_error"])
            td_errors = jax.lax.dynamic_update_index_in_dim(td_errors, td_error, k, axis=0)
            sums = sums + jnp.stack([loss, aux["q"].mean(), td_error.mean()])
            return {"parameters": parameters, "target": target, "optimizer": adam}, td_errors, sums

        td_errors = jnp.zeros(batches["reward_t"].shape, jnp.float32)
        carry = (state, td_errors, jnp.zeros(3))
        return update(0, carry) if len(td_errors) == 1 else jax.lax.fori_loop(0, count, update, carry)

    return jax.jit(updates)


class DqnLearner:
    """Parameters, target and Adam's state, and the updates of them."""

    def __init__(self, config: Config, spaces: Spaces, seed: int) -> None:
        import jax
        import optax

        from srl.rl import networks

        config.validate()
        network = make_network(config, spaces, learning=True)
        optimizer = optax.scale_by_adam()
        parameters = networks.first_parameters(network, spaces, seed)
        self._config = config
        self._size = config.dispatch_size(spaces)
        # XLA computes convolutions inside a loop several times slower on a CPU; a call costs little beside them.
        self._on_cpu = jax.default_backend() == "cpu"
        self._size_of_call = 1 if network.images is not None and self._on_cpu else self._size
        self._updates = make_updates(config, network, optimizer)
        self._state: dict[str, Any] = {
            "parameters": parameters,
            "target": parameters,
            "optimizer": optimizer.init(parameters),
        }
        self._train_count = 0

    @property
    def has_accelerator(self) -> bool:
        """Whether JAX computes elsewhere than on the CPU."""
        return not self._on_cpu

    def place(self, batches: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Bring batches to where JAX computes."""
        import jax

        placed: Mapping[str, Any] = jax.device_put(dict(batches))
        return placed

    def update(self, batches: Mapping[str, Any]) -> UpdateInfo:
        """Do up to `updates_per_dispatch` updates on batches `[K, B, ...]`; priorities are absolute TD errors.

        Metrics are means over the `K` updates.
        """
        count, size = len(batches["reward_t"]), self._size_of_call
        if not 1 <= count <= self._size:
            raise ValueError(f"{count} updates at once; dqn.Config.updates_per_dispatch allows 1 to {self._size}")
        learning_rates = self._config.lr.value(self._train_count + np.arange(count)).astype(np.float32)
        results = []
        for start in range(0, count, size):
            stop = min(start + size, count)
            part = batches
            if count != size:
                part = {name: _pad(array[start:stop], size) for name, array in batches.items()}
            since_copy = np.int32(self._train_count % self._config.target_model_update_interval)
            self._state, td_errors, sums = self._updates(
                self._state, part, _pad(learning_rates[start:stop], size), np.int32(stop - start), since_copy
            )
            self._train_count += stop - start
            results.append((td_errors, sums))
        priorities = np.concatenate([np.asarray(td_errors) for td_errors, _ in results])[:count]
        loss, q, td_error = (
            float(value) / count for value in np.sum([np.asarray(sums) for _, sums in results], axis=0)
        )
        metrics = {"loss": loss, "q": q, "td_error": td_error, "lr": float(learning_rates[-1])}
        return UpdateInfo(priorities, metrics)

    def prepare(self, batches: Mapping[str, np.ndarray]) -> None:
        """Compile the updates for batches `[K, B, ...]` of these shapes; changes nothing."""
        size = self._size_of_call
        part = {name: array[:size] for name, array in batches.items()}
        self._updates(self._state, part, np.zeros(size, np.float32), np.int32(0), np.int32(0))

    @property
    def parameters(self) -> Tree:
        """The network's parameters."""
        parameters: Tree = self._state["parameters"]
        return parameters

    @property
    def train_count(self) -> int:
        """Updates done since the parameters were first made."""
        return self._train_count

    def set_parameters(self, parameters: Tree) -> None:
        """Start anew from published parameters, for network and target; Adam's moments are fresh."""
        import jax
        import jax.numpy as jnp

        check_matches(parameters, self.parameters)
        tree = jax.tree.map(jnp.array, dict(parameters))
        zeros = jax.tree.map(jnp.zeros_like, self._state["optimizer"])
        self._state = {"parameters": tree, "target": tree, "optimizer": zeros}

    def get_state(self) -> dict[str, Any]:
        """Return parameters, target, Adam's moments and the train count as numpy arrays."""
        import jax

        adam = self._state["optimizer"]
        tree = {
            "parameters": self._state["parameters"],
            "target": self._state["target"],
            "optimizer": {"count": adam.count, "mu": adam.mu, "nu": adam.nu},
        }
        return {**jax.device_get(tree), "train_count": np.asarray(self._train_count, np.int64)}

    def set_state(self, state: Tree) -> None:
        """Go on from `get_state`'s tree; raises `CheckpointError` where it does not fit."""
        import jax
        import jax.numpy as jnp

        self.check_valid(state)
        tree = jax.tree.map(jnp.array, {name: state[name] for name in ("parameters", "target", "optimizer")})
        self._state = {**tree, "optimizer": self._state["optimizer"]._replace(**tree["optimizer"])}
        self._train_count = int(state["train_count"])

    def check_valid(self, state: Tree) -> None:
        """Raise `CheckpointError` that names the first array which does not fit this learner."""
        check_matches(state, self.get_state())


def _pad(array: np.ndarray, size: int) -> np.ndarray:
    """Fill `[K, ...]` up to `[size, ...]`; what is added is never looked at."""
    if len(array) == size:
        return array
    padded = np.zeros((size, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded


# --- policy -----------------------------------------------------------------------------------------------


class DqnPolicy:
    """Greedy or epsilon-greedy actions, and first guesses of priorities from the values they came from."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        import jax

        from srl.rl import networks

        config.validate()
        network = make_network(config, spaces, learning=False)
        self._config = config
        self._action_count = spaces.action_count
        self._expected = jax.eval_shape(lambda: networks.first_parameters(network, spaces, seed=0))
        self._device = jax.devices("cpu")[0]
        self._q = jax.jit(functools.partial(networks.q_values, network))

    def load(self, parameters: Tree) -> Any:
        """Return the parameters on the CPU, which answers a few lanes faster than a GPU does."""
        import jax

        check_matches(parameters, self._expected)
        return jax.device_put(parameters, self._device)

    def initial_state(self, lanes: int) -> None:
        """Return `None`: nothing is remembered between steps."""
        return None

    def act(
        self,
        parameters: Any,
        observation: np.ndarray,
        state: Tree | None,
        rng: np.random.Generator,
        explore: Exploration | None,
    ) -> Step:
        """Choose actions `[B]` for observations `[B, window, *frame]`; greedily where `explore` is `None`."""
        q = np.asarray(self._q(parameters, observation))
        lanes = np.arange(len(q))
        greedy = q.argmax(axis=-1)
        if explore is None:
            action = greedy.astype(np.int32)
        else:
            action = epsilon_greedy(greedy, self._action_count, self._epsilon(explore), rng)
        return Step(action, scores={"q_taken": q[lanes, action], "q_max": q[lanes, greedy]})

    def priorities(
        self, rewards: np.ndarray, end: End, transitions: range, scores: Mapping[str, np.ndarray]
    ) -> np.ndarray | None:
        """Return absolute n-step TD errors `[T]`, bootstrapped with the acting network's highest value.

        NaN where a transition reaches a frame that was not acted on. `None` for a uniform memory.
        """
        from srl.rl import losses

        config = self._config
        if config.memory.kind == "uniform":
            return None
        if config.enable_reward_clip:
            rewards = np.clip(rewards, *REWARD_CLIP)
        starts = np.asarray(transitions, np.intp)
        reached = np.minimum(starts + config.n_step, len(rewards))
        padded = np.concatenate([rewards, np.zeros(config.n_step, rewards.dtype)])
        reward_t = np.zeros(len(starts))
        for i in range(config.n_step):
            reward_t += config.discount**i * padded[starts + i]
        terminal = (reached == len(rewards)) & (end is End.TERMINATED)
        discount_t = np.where(terminal, 0.0, config.discount ** (reached - starts))
        # A terminal frame is not acted on, and 0 times its NaN would be NaN.
        value_t = np.where(terminal, 0.0, scores["q_max"][reached])
        target = losses.q_target(reward_t, discount_t, value_t, rescale=config.enable_rescale)
        error: np.ndarray = np.abs(target - scores["q_taken"][starts])
        return error.astype(np.float32)

    def _epsilon(self, explore: Exploration) -> np.ndarray | float:
        """Return each lane's probability of a uniform action."""
        if self._config.epsilon.is_set:
            return self._config.epsilon.value(explore.train_count)
        if explore.distributed:
            return ladder(explore.lanes, explore.total_lanes)
        return EPSILON_IN_ONE_PROCESS
