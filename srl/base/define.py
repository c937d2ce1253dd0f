"""Names that every layer shares."""

import enum


class EnvObservationTypes(enum.Enum):
    """What an observation is, as image processors and networks need to know it.

    `GRAY_2ch` is `[height, width]`, `GRAY_3ch` `[height, width, 1]`, `COLOR` `[height, width, 3]`;
    `SHAPE2` and `SHAPE3` are arrays of that rank that are no images.
    """

    UNKNOWN = "unknown"
    DISCRETE = "discrete"
    CONTINUOUS = "continuous"
    GRAY_2ch = "gray_2ch"
    GRAY_3ch = "gray_3ch"
    COLOR = "color"
    SHAPE2 = "shape2"
    SHAPE3 = "shape3"
