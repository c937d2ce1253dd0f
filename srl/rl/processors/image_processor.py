"""Image processing of single frames: grey, trim, resize, in this order, on bytes.

Users put an `ImageProcessor` into `Config.processors`. Frames stay uint8 in memories and on the wire;
`enable_norm` divides by 255 inside the network, where it costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from srl.base.define import EnvObservationTypes
from srl.base.errors import MissingExtraError, SpaceError
from srl.base.processor import Processor
from srl.base.settings import setting
from srl.base.spaces import is_image

_CHANNELS: dict[EnvObservationTypes, tuple[int, ...]] = {
    EnvObservationTypes.GRAY_2ch: (),
    EnvObservationTypes.GRAY_3ch: (1,),
    EnvObservationTypes.COLOR: (3,),
}


@dataclass
class ImageProcessor(Processor):
    """Turns image observations `[height, width, 3]`, `[height, width, 1]` or `[height, width]` into smaller ones."""

    image_type: EnvObservationTypes = setting(
        EnvObservationTypes.GRAY_2ch,
        choices=tuple(_CHANNELS),
        doc="GRAY_2ch gives [height, width], GRAY_3ch [height, width, 1], COLOR [height, width, 3]",
    )
    trimming: tuple[int, int, int, int] | None = setting(
        None, low=0, doc="(top, left, bottom, right) of the part to keep, in pixels of the env's image"
    )
    resize: tuple[int, int] | None = setting(None, low=1, doc="(width, height) after trimming, in pixels")
    enable_norm: bool = setting(True, doc="whether the network sees 0 to 1 instead of 0 to 255")

    @property
    def frame_scale(self) -> float:
        """What the network multiplies frames by."""
        return 1 / 255 if self.enable_norm else 1.0

    @property
    def frame_function(self) -> Callable[[np.ndarray], np.ndarray]:
        """What is done to each frame."""
        return self.process

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with images processed; `SpaceError` where it has none or the trim lies outside."""
        try:
            import cv2  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("ImageProcessor needs OpenCV: pip install 'srl[atari]'") from error
        space = gymnasium.spaces.Box(0, 255, self.output_shape(env.observation_space), np.uint8)
        return gymnasium.wrappers.TransformObservation(env, self.process, space)

    def output_shape(self, space: gymnasium.Space[Any]) -> tuple[int, ...]:
        """Return the shape that observations of `space` get; `SpaceError` where they are no images."""
        if not is_image(space):
            raise SpaceError(
                "ImageProcessor needs uint8 images [height, width], [height, width, 1] or [height, width, 3], not "
                f"{space}; remove it from config.processors for this env, or add to EnvConfig.gym_wrappers what makes "
                "such images of its observations"
            )
        height, width = (space.shape or ())[:2]
        if self.trimming is not None:
            top, left, bottom, right = self.trimming
            if not (top < bottom <= height and left < right <= width):
                raise SpaceError(
                    f"ImageProcessor.trimming (top, left, bottom, right) = {self.trimming} does not lie within the "
                    f"env's image of height {height} and width {width}"
                )
            height, width = bottom - top, right - left
        if self.resize is not None:
            width, height = self.resize
        return (height, width, *_CHANNELS[self.image_type])

    def process(self, image: np.ndarray) -> np.ndarray:
        """Return one image as the agent sees it, uint8 of `output_shape`."""
        import cv2

        is_color = image.ndim == 3 and image.shape[2] == 3
        if self.image_type is EnvObservationTypes.COLOR:
            image = image if is_color else cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)
        elif is_color:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        if self.trimming is not None:
            top, left, bottom, right = self.trimming
            image = image[top:bottom, left:right]
        if self.resize is not None:
            # Area averaging keeps small things (Pong's ball) visible when shrinking.
            image = cv2.resize(np.ascontiguousarray(image), self.resize, interpolation=cv2.INTER_AREA)
        return image[..., None] if self.image_type is EnvObservationTypes.GRAY_3ch and image.ndim == 2 else image
