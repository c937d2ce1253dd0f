import pytest

from srl.base.errors import ConfigError, UnknownFieldError
from srl.rl.memories.config import MemoryConfig


def test_promised_defaults_and_methods() -> None:
    config = MemoryConfig()
    assert (config.capacity, config.warmup_size, config.kind) == (100_000, 1_000, "uniform")
    config.set_proportional_memory()
    assert (config.kind, config.alpha, config.beta_initial, config.beta_steps) == ("proportional", 0.6, 0.4, 1_000_000)
    config.set_rankbase_memory(alpha=0.9, beta_initial=0.1, beta_steps=5)
    assert (config.kind, config.alpha, config.beta_initial, config.beta_steps) == ("rank", 0.9, 0.1, 5)
    config.set_replay_memory()
    assert config.kind == "uniform"
    assert MemoryConfig.from_dict(config.to_dict()) == config


def test_every_field_is_documented() -> None:
    assert all(MemoryConfig.documentation().values())


def test_contradictions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"warmup_size \(101\).*capacity \(100\)"):
        MemoryConfig(capacity=100, warmup_size=101).validate()
    MemoryConfig(capacity=100, warmup_size=100).validate()
    with pytest.raises(ConfigError, match=r"warmup_size \(31\).*batch_size \(32\)"):
        MemoryConfig(warmup_size=31).check_batch(32)
    MemoryConfig(warmup_size=32).check_batch(32)
    with pytest.raises(UnknownFieldError, match="did you mean 'capacity'"):
        MemoryConfig().capasity = 5
    with pytest.raises(ConfigError, match="proportional"):
        MemoryConfig().kind = "proportionel"


def test_beta_grows_linearly_to_one() -> None:
    config = MemoryConfig(beta_initial=0.4, beta_steps=100)
    assert [config.beta(at) for at in (0, 50, 100, 1000)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
