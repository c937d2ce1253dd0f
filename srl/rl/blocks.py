"""Network settings that algorithms' configs hold; `srl.rl.networks` builds the networks from them."""

from dataclasses import dataclass

from srl.base.settings import Settings, setting

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
