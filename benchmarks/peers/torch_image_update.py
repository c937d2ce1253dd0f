"""The double DQN update of an image network in PyTorch, beside `benchmarks.images`; needs torch and numpy only."""

import argparse
import time

import numpy as np
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layers(inputs)


def make_network(block: str) -> nn.Sequential:
    if block == "dqn":
        sizes = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        layers: list[nn.Module] = [part for size in sizes for part in (nn.Conv2d(*size), nn.ReLU())]
        features = 3136
    else:
        layers = []
        for inputs, outputs in ((4, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.MaxPool2d(3, 2, 1), Residual(outputs), Residual(outputs)]
        layers.append(nn.ReLU())
        features = 3872
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 6))


def main() -> None:
    """Print updates a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", choices=("dqn", "r2d3"), default="dqn")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    online, target = make_network(arguments.block), make_network(arguments.block)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), 0.00025)
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (32, 4, 84, 84), dtype=np.uint8) for _ in range(2)]
    action = torch.tensor(rng.integers(0, 6, 32))
    reward, weight = torch.tensor(rng.normal(size=32).astype(np.float32)), torch.ones(32)

    def update() -> np.ndarray:
        before, after = (torch.from_numpy(array).float() / 255 for array in frames)
        with torch.no_grad():
            best = online(after).argmax(1, keepdim=True)
            value = reward + 0.97 * target(after).gather(1, best)[:, 0]
        error = value - online(before).gather(1, action[:, None])[:, 0]
        loss = (weight * error * error).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return error.detach().abs().numpy()

    for _ in range(5):
        update()
    count, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < arguments.seconds:
        update()
        count += 1
    print(count / (time.perf_counter() - started_s))


if __name__ == "__main__":
    main()
