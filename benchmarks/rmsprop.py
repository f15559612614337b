"""Runs a training script with RMSprop in place of Adam, as PyMARL trained what SMAC's table shows.

python benchmarks/rmsprop.py qmix.py --env-id 2s3z --cuda --learning-rate 5e-4
"""

import runpy
import sys

import torch


class RMSprop(torch.optim.RMSprop):
    """PyMARL's RMSprop. An update that is not finite moves no weight, as with the scripts' Adam."""

    def __init__(self, parameters, learning_rate, fused, capturable, eps=1e-5):
        super().__init__(parameters, learning_rate, alpha=0.99, eps=eps, foreach=True, capturable=capturable)
        self.found_inf = None

    def step(self):
        if self.found_inf is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.masked_fill_(self.found_inf.bool(), 0.0)
        super().step()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
        sys.exit(__doc__)
    torch.optim.Adam = RMSprop
    sys.argv = sys.argv[1:]
    sys.path.insert(0, "")  # where the script's `envs` is
    runpy.run_path(sys.argv[0], run_name="__main__")
