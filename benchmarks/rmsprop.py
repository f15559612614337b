"""Runs a training script with RMSprop in place of Adam, as PyMARL trained what SMAC's table shows.

python benchmarks/rmsprop.py qmix.py --env-id 2s3z --cuda --learning-rate 5e-4     (and so with --resume)
"""

import runpy
import sys
from pathlib import Path

import torch


class RMSprop(torch.optim.RMSprop):
    """PyMARL's RMSprop. An update that is not finite moves no weight, as with the scripts' Adam."""

    def __init__(self, parameters, learning_rate, eps=1e-5, fused=True, capturable=False):
        super().__init__(parameters, learning_rate, alpha=0.99, eps=eps, foreach=True, capturable=capturable)
        self.found_inf = torch.zeros(())

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(self.found_inf.to(parameter.device) > 0, 0.0)
        super().step()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
        sys.exit(__doc__)
    torch.optim.Adam = RMSprop
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as if the script had been started itself
    runpy.run_path(sys.argv[0], run_name="__main__")
