"""Pictures: grey, trim, resize in this order, on bytes; what is no picture is refused."""

import itertools
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

import srl
from srl.algorithms import dqn
from srl.base.define import EnvObservationTypes
from srl.base.env import EnvConfig, make_agent_env
from srl.base.errors import ConfigError, MissingExtraError, SpaceError
from srl.rl.processors.image_processor import ImageProcessor

GRAY_2ch, GRAY_3ch, COLOR = EnvObservationTypes.GRAY_2ch, EnvObservationTypes.GRAY_3ch, EnvObservationTypes.COLOR


def picture(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


class Shown(gymnasium.Env[Any, Any]):
    """Always shows the same thing."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shown: np.ndarray, space: gymnasium.Space[Any] | None = None) -> None:
        self._shown = shown
        high = 255 if shown.dtype == np.uint8 else 1.0
        self.observation_space = space or gymnasium.spaces.Box(0, high, shown.shape, shown.dtype.type)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown, 0.0, False, False, {}


def seen(processor: ImageProcessor, shown: np.ndarray) -> np.ndarray:
    env = processor.wrap(Shown(shown))
    first, _ = env.reset()
    again, *_ = env.step(0)
    np.testing.assert_array_equal(first, again)
    assert env.observation_space.contains(first)
    return first


def grey(image: np.ndarray) -> np.ndarray:
    """The luma of ITU-R BT.601, which OpenCV rounds to the nearest."""
    return np.rint(image.astype(float) @ [0.299, 0.587, 0.114])


def test_grey_is_luma_and_keeps_bytes() -> None:
    image = picture(7, 5, 3)
    result = seen(ImageProcessor(), image)
    assert result.shape == (7, 5) and result.dtype == np.uint8
    assert np.abs(result - grey(image)).max() <= 1


@pytest.mark.parametrize(("given", "wanted"), list(itertools.product([(), (1,), (3,)], [GRAY_2ch, GRAY_3ch, COLOR])))
def test_every_kind_of_picture_becomes_every_other(given: tuple[int, ...], wanted: EnvObservationTypes) -> None:
    image = picture(12, 8, *given)
    result = seen(ImageProcessor(image_type=wanted, trimming=(1, 0, 11, 6), resize=(3, 5)), image)
    assert result.shape == (5, 3, *{GRAY_2ch: (), GRAY_3ch: (1,), COLOR: (3,)}[wanted])
    part = image[1:11, :6].reshape(10, 6, -1)
    cells = part.reshape(5, 2, 3, 2, -1).mean(axis=(1, 3))
    if given == (3,) and wanted is not COLOR:
        cells = grey(cells)[..., None]
    expected = np.broadcast_to(cells, (5, 3, 3 if wanted is COLOR else 1))
    assert np.abs(result.reshape(5, 3, -1) - expected).max() <= 1.5


def test_trimming_is_top_left_bottom_right_of_the_env_s_picture() -> None:
    image = picture(20, 10)
    result = seen(ImageProcessor(trimming=(3, 2, 18, 9)), image)
    np.testing.assert_array_equal(result, image[3:18, 2:9])


def test_resize_is_width_then_height_and_averages_areas() -> None:
    image = np.zeros((8, 12), np.uint8)
    image[4:8, 9:12] = 200
    result = seen(ImageProcessor(resize=(4, 2)), image)
    np.testing.assert_array_equal(result, [[0, 0, 0, 0], [0, 0, 0, 200]])


@pytest.mark.parametrize(
    "trimming", [(0, 0, 21, 10), (0, 0, 20, 11), (5, 0, 5, 10), (0, 6, 20, 4)], ids=lambda value: str(value)
)
def test_a_trim_outside_the_picture_is_refused(trimming: tuple[int, int, int, int]) -> None:
    with pytest.raises(SpaceError, match=r"trimming .* does not lie within .* height 20 and width 10"):
        ImageProcessor(trimming=trimming).wrap(Shown(picture(20, 10, 3)))


@pytest.mark.parametrize("change", [{"trimming": (-1, 0, 5, 5)}, {"resize": (0, 4)}, {"resize": 84}])
def test_impossible_settings_are_refused_at_once(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ImageProcessor(**change)


@pytest.mark.parametrize(
    "shown",
    [picture(5), picture(3, 8, 8), picture(8, 8, 4), np.zeros((8, 8, 3), np.float32)],
    ids=lambda x: str(x.shape),
)
def test_what_is_no_picture_of_bytes_is_refused(shown: np.ndarray) -> None:
    with pytest.raises(SpaceError, match="needs uint8 images"):
        ImageProcessor().wrap(Shown(shown))


def test_float_pictures_are_told_how_to_become_bytes() -> None:
    with pytest.raises(SpaceError, match=r"float32\); .*add to EnvConfig\.gym_wrappers what makes such images"):
        ImageProcessor().wrap(Shown(np.zeros((8, 8, 3), np.float32)))


def test_missing_opencv_names_the_extra_whoever_asked_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    env = EnvConfig("shown", gym_make_func=lambda *_: Shown(picture(210, 160, 3)))
    for config in (dqn.Config(), dqn.Config(processors=[ImageProcessor()])):
        with pytest.raises(MissingExtraError, match=r"OpenCV: pip install 'srl\[atari\]'"):
            make_agent_env(env, config)


@pytest.mark.parametrize(("enable_norm", "scale"), [(True, 1 / 255), (False, 1.0)])
def test_norm_leaves_bytes_and_tells_the_network_what_to_multiply_by(enable_norm: bool, scale: float) -> None:
    image = picture(40, 40, 3)
    config = dqn.Config(processors=[ImageProcessor(enable_norm=enable_norm)])
    env = make_agent_env(EnvConfig("shown", gym_make_func=lambda *_: Shown(image)), config)
    frame, _ = env.reset()
    assert frame.dtype == np.uint8 and env.spaces.observation.scale == scale
    assert env.spaces.observation.type is GRAY_2ch


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((210, 160, 3), (84, 84)),
        ((210, 160), (84, 84)),
        ((64, 64, 3), (64, 64)),
        ((64, 100, 1), (84, 84)),
        ((64, 64, 1), (64, 64, 1)),
        ((84, 84), (84, 84)),
        ((84, 84, 4), (84, 84, 4)),
    ],
)
def test_dqn_makes_pictures_small_and_grey_by_itself(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    config = dqn.Config()
    env = EnvConfig("shown", gym_make_func=lambda *_: Shown(picture(*shape)))
    assert make_agent_env(env, config).spaces.observation.shape == expected
    config.use_rl_processor = False
    assert make_agent_env(env, config).spaces.observation.shape == shape


def test_dqn_leaves_what_is_no_picture_alone() -> None:
    assert dqn.Config().default_processors(gymnasium.spaces.Discrete(3)) == []
    assert srl.Runner("CartPole-v1", dqn.Config()).spaces.observation.shape == (4,)
