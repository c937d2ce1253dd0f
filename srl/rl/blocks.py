"""Network settings that algorithms' configs hold; `srl.rl.networks` builds the networks from them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srl.base.errors import ConfigError, SpaceError
from srl.base.settings import Named, Settings, setting
from srl.base.spaces import ObservationSpec

if TYPE_CHECKING:
    import jax

ACTIVATIONS = ("relu", "elu", "gelu", "leaky_relu", "silu", "tanh")


@dataclass
class HiddenBlock(Settings):
    """The fully connected layers between the encoded observation and a network's output."""

    kind: str = setting(
        "mlp", choices=("mlp", "dueling"), doc="plain layers, or separate streams for value and advantages"
    )
    layer_sizes: tuple[int, ...] = setting(
        (512,), low=1, doc="units of each hidden layer; large ones learn more and cost more; empty is linear"
    )
    activation: str = setting("relu", choices=ACTIVATIONS, doc="function after every hidden layer")

    def set_mlp(self, layer_sizes: tuple[int, ...] = (512,), activation: str = "relu") -> None:
        """Use plain fully connected layers."""
        self.kind, self.layer_sizes, self.activation = "mlp", layer_sizes, activation

    def set_dueling_network(self, layer_sizes: tuple[int, ...] = (512,), activation: str = "relu") -> None:
        """Use a dueling network: all layers but the last are shared, each stream has a last one of its own.

        Wang et al., 2016, https://arxiv.org/abs/1511.06581.
        """
        self.kind, self.layer_sizes, self.activation = "dueling", layer_sizes, activation


class ImageLayers(Named, key="image_layers"):
    """Base of image layers of your own: a dataclass that subclasses it registers under its class name.

    Give it to `ImageBlock.set_custom`. Workers must be allowed to import its module, as for processors.
    """

    def features(self, images: "jax.Array") -> "jax.Array":
        """Return features `[N, ...]` of images `[N, height, width, channels]` float32.

        Called inside a flax module's compact method, so flax layers can be made right where they are used:
        `return nn.relu(nn.Conv(16, (3, 3))(images))`. Frames of a window are channels, the oldest first.
        """
        raise ConfigError(f"{type(self).__name__} must define features(images)")


@dataclass
class ImageBlock(Settings):
    """The layers between image observations and the hidden layers."""

    kind: str = setting(
        "auto",
        choices=("auto", "dqn", "r2d3", "custom"),
        doc="auto: those of DQN for images, none for anything else; r2d3 learns more and costs several times as much",
    )
    activation: str = setting("relu", choices=ACTIVATIONS, doc="function after every convolution")
    custom: ImageLayers | None = setting(None, doc="layers of your own, for the kind 'custom'")
    compute_dtype: str = setting(
        "float32",
        choices=("float32", "bfloat16"),
        doc="numbers that convolutions compute with; bfloat16 is fast on GPUs and coarse, parameters stay float32",
    )

    def set_dqn_image(self, activation: str = "relu") -> None:
        """Use the three convolutions of DQN (Mnih et al. 2015), for images of at least 36 x 36."""
        self.kind, self.activation, self.custom = "dqn", activation, None

    def set_r2d3_image(self, activation: str = "relu") -> None:
        """Use the residual stack of IMPALA (Espeholt et al. 2018), which R2D3 uses too."""
        self.kind, self.activation, self.custom = "r2d3", activation, None

    def set_custom(self, layers: ImageLayers) -> None:
        """Use layers of your own."""
        self.kind, self.custom = "custom", layers

    def validate(self) -> None:
        """Raise `ConfigError` where kind and custom layers contradict each other."""
        super().validate()
        if (self.kind == "custom") != (self.custom is not None):
            raise ConfigError("image_block: choose layers of your own by image_block.set_custom(layers)")

    def applies_to(self, observation: ObservationSpec) -> bool:
        """Return whether such observations go through image layers.

        Raises:
            SpaceError: image layers were asked for, but these observations are no images or are too small.
        """
        height, width = (*observation.shape, 0, 0)[:2]
        fits = height >= _DQN_SMALLEST and width >= _DQN_SMALLEST
        if self.kind == "auto":
            return observation.is_image and fits
        if observation.kind != "box" or len(observation.shape) not in (2, 3):
            raise SpaceError(
                f"image_block.kind is {self.kind!r}, but observations have shape {observation.shape}: images are "
                "[height, width] or [height, width, channels]; leave image_block as it is for this env"
            )
        if self.kind == "dqn" and not fits:
            hint = "; channels must come last" if len(observation.shape) == 3 and height <= 4 < width else ""
            raise SpaceError(
                f"the convolutions of DQN need images of at least {_DQN_SMALLEST} x {_DQN_SMALLEST}, not {height} x "
                f"{width}{hint}; resize with an ImageProcessor, or use image_block.set_r2d3_image()"
            )
        return True


_DQN_SMALLEST = 36
