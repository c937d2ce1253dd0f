"""Settings of the replay memory: how much it holds and which transitions it prefers.

An algorithm's config has one as `memory`; `srl.rl.memories.replay` is built from it.
"""

from dataclasses import dataclass

from srl.base.errors import ConfigError
from srl.base.settings import Settings, setting


@dataclass
class MemoryConfig(Settings):
    """How much the memory holds and how it draws: uniformly, or by priority (Schaul et al. 2016)."""

    capacity: int = setting(
        100_000,
        low=1,
        doc="transitions the memory holds; low forgets fast, high needs more memory and learns from older play",
    )
    warmup_size: int = setting(
        1_000,
        low=1,
        doc="transitions stored before the first update; low learns from few similar ones, high starts later",
    )
    kind: str = setting(
        "uniform",
        choices=("uniform", "proportional", "rank"),
        doc="how transitions are drawn: all alike, by absolute TD error, or by the rank of that error",
    )
    alpha: float = setting(
        0.6, low=0, high=2, doc="exponent of priorities; 0 draws uniformly, high draws large errors more often"
    )
    beta_initial: float = setting(
        0.4, low=0, high=1, doc="importance correction at the start; 0 corrects nothing, 1 the whole bias"
    )
    beta_steps: int = setting(1_000_000, low=1, doc="updates over which the importance correction grows linearly to 1")
    rank_interval: int = setting(
        1_000,
        low=1,
        doc="updates after which a rank memory sorts its priorities anew; low is exact, high saves computing",
    )

    def set_replay_memory(self) -> None:
        """Draw all transitions alike."""
        self.kind = "uniform"

    def set_proportional_memory(
        self, alpha: float = 0.6, beta_initial: float = 0.4, beta_steps: int = 1_000_000
    ) -> None:
        """Draw in proportion to (absolute TD error) ** `alpha` (Schaul et al. 2016, section 3.3)."""
        self.kind = "proportional"
        self.alpha, self.beta_initial, self.beta_steps = alpha, beta_initial, beta_steps

    def set_rankbase_memory(
        self,
        alpha: float = 0.7,
        beta_initial: float = 0.5,
        beta_steps: int = 1_000_000,
        rank_interval: int = 1_000,
    ) -> None:
        """Draw in proportion to (1 / rank of the absolute TD error) ** `alpha`, which outliers do not disturb."""
        self.kind = "rank"
        self.alpha, self.beta_initial, self.beta_steps = alpha, beta_initial, beta_steps
        self.rank_interval = rank_interval

    def validate(self) -> None:
        """Raise `ConfigError` where the warm-up could never be reached."""
        super().validate()
        if self.warmup_size > self.capacity:
            raise ConfigError(
                f"memory.warmup_size ({self.warmup_size}) is above memory.capacity ({self.capacity}), so training "
                "would never start; raise memory.capacity or lower memory.warmup_size"
            )

    def check_batch(self, batch_size: int) -> None:
        """Raise `ConfigError` where the first batch would be larger than what is stored by then."""
        if self.warmup_size < batch_size:
            raise ConfigError(
                f"memory.warmup_size ({self.warmup_size}) is below batch_size ({batch_size}); raise "
                "memory.warmup_size or lower batch_size"
            )

    def beta(self, train_count: float) -> float:
        """Return the exponent of importance weights after `train_count` updates."""
        return self.beta_initial + (1.0 - self.beta_initial) * min(train_count / self.beta_steps, 1.0)
