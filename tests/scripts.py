"""The training scripts as modules, and a game of a few numbers for them."""

import importlib.util
import sys
from pathlib import Path

import torch
from tensorboard.summary.writer import event_file_writer

# TensorBoard reads the logs of a second in the order of their names, which end in a number that counts the writers of a
# process: 10 would come before 9. Runs of their own have a process each; those of the tests share one.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

ROOT = Path(__file__).parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPTS = {name: load(name) for name in ("iql", "vdn", "qmix")}


class TinyGame:
    """Two players with two actions each go from stage to stage; at every stage a table has what both earn.

    It has what the scripts use of an environment (docs/environments.md), in plain torch.
    """

    name, n_agents, n_actions, policies, team_reward, simulated = "tiny", 2, 2, (), True, True
    device = torch.device("cpu")

    def __init__(self, payoff, following, num_envs):
        """(stages, 2, 2) numbers and next stages, -1 for the end"""
        self.payoff, self.following = torch.tensor(payoff, dtype=torch.float32), torch.tensor(following)
        self.num_envs, self.obs_dim, self.state_dim, self.episode_limit = num_envs, len(payoff), len(payoff), 2
        self.stage, self.actions = torch.zeros(num_envs, dtype=torch.long), torch.zeros(num_envs, 2, dtype=torch.long)
        self.obs, self.reward = torch.zeros(num_envs, 2, self.obs_dim), torch.zeros(num_envs, 2)
        yes = torch.zeros(num_envs, dtype=torch.bool)
        self.terminated, self.truncated = yes.clone(), yes.clone()
        self.info = {
            "state": torch.zeros(num_envs, self.state_dim),
            "avail": torch.ones(num_envs, 2, 2, dtype=torch.bool),
            "alive": torch.ones(num_envs, 2, dtype=torch.bool),
            "won": yes.clone(),
            "invalid": yes.clone(),
        }

    def look(self):
        self.info["state"].copy_(torch.eye(self.state_dim + 1)[self.stage][:, : self.state_dim])  # -1: zeros
        self.obs.copy_(self.info["state"].unsqueeze(1).expand_as(self.obs))
        self.terminated.copy_(self.stage < 0)

    def reset(self):
        self.stage.zero_()
        self.look()
        return self.obs, self.info

    def step(self, actions):
        running, here = self.stage >= 0, (self.stage.clamp(min=0), *actions.unbind(1))
        self.reward.copy_((self.payoff[here] * running).unsqueeze(1).expand_as(self.reward))
        self.stage.copy_(torch.where(running, self.following[here], -1))
        self.look()
        return self.obs, self.reward, self.terminated, self.truncated, self.info


def two_step_game(num_envs):
    """Of the QMIX paper: the first player chooses between 7 for sure and a table whose best is 8."""
    payoff = [[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]]
    following = [[[1, 1], [2, 2]], [[-1, -1], [-1, -1]], [[-1, -1], [-1, -1]]]
    return TinyGame(payoff, following, num_envs)


def matrix_game(num_envs):
    return TinyGame([[[0, 3], [2, 6]]], [[[-1, -1], [-1, -1]]], num_envs)


def scramble(learner, scale):
    """Gives every network weights of its own, whose answers are far from equal."""
    with torch.no_grad():
        for network in (*learner.online.values(), *learner.target.values(), *learner.model.values()):
            for weights in network.parameters():
                weights.copy_(torch.randn_like(weights) * scale)
    return learner
