"""The training scripts as modules, how tests run them, and a game of a few numbers for them."""

import runpy
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import belief_iql
import brdiv
import coma
import hop
import ippo
import iql
import liam_iql
import mappo
import mix_iql
import naive_om_iql
import omg_iql
import qmix
import qtran
import vdn
from training import checkpoints
from training.episodes import Episodes
from training.exits import SIGNALS

# TensorBoard reads the logs of a second in the order of their names, which end in a number that counts the writers of a
# process: 10 would come before 9. Runs of their own have a process each; those of the tests share one.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

ROOT = Path(__file__).parent.parent
TEAM_SCRIPTS = {"iql": iql, "vdn": vdn, "qmix": qmix, "qtran": qtran}  # all seats learn by default
MODEL_SCRIPTS = {  # one learner among others
    "naive_om_iql": naive_om_iql, "liam_iql": liam_iql, "omg_iql": omg_iql, "mix_iql": mix_iql,
    "belief_iql": belief_iql,
}  # fmt: skip
SCRIPTS = {**TEAM_SCRIPTS, **MODEL_SCRIPTS}
POLICY_SCRIPTS = {"ippo": ippo, "mappo": mappo}  # policy gradients, without a replay buffer
POPULATION_SCRIPTS = {"brdiv": brdiv}  # several policies learn at a time, in pairs
PLANNERS = {"hop": hop}
ALL_SCRIPTS = {**SCRIPTS, **POLICY_SCRIPTS, **POPULATION_SCRIPTS, **PLANNERS, "coma": coma}
QUICK = {
    "num_envs": 4, "batch_size": 4, "buffer_size": 8, "train_frequency": 60, "total_timesteps": 400,
    "eval_interval": 200, "eval_episodes": 4, "final_eval_episodes": 6, "hidden_dim": 16, "log_interval": 0,
}  # fmt: skip
QUICK_EPISODES = {key: QUICK[key] for key in QUICK if key not in ("batch_size", "buffer_size", "train_frequency")}
QUICK_POLICY = QUICK_EPISODES | {"num_steps": 24, "update_epochs": 2, "num_minibatches": 2}
QUICK_PLANNER = {key: QUICK[key] for key in QUICK if key not in ("buffer_size", "train_frequency")}
QUICK_PLANNER |= {
    "env_id": "stag_hunt_4x4",
    "batch_size": 64,
    "sims": 6,
    "trees": 2,
    "train_sims": 4,
    "rollout_steps": 2,
    "depth": 4,
    "channels": (4,),
}
NOT_TRAINED = {  # what a checkpoint has besides networks and arguments
    "optimizer": {}, "updates": 0, "resume": None,
    "progress": {"steps": 0, "episodes": 0, "seconds": 0.0, "evals": [], "complete": True, "next_eval": 1},
}  # fmt: skip
QUICK_POPULATION = {**QUICK, "population_size": 2}
QUICK_MODEL = {"pretrain_timesteps": 200, "pretrain_updates": 20}  # of omg_iql, in addition
QUICK_PRETRAINING = {"num_envs": 4, "batch_size": 4, **QUICK_MODEL}  # of pretrain_cvae


def quick_options(name):
    if name == "pretrain_cvae":
        return QUICK_PRETRAINING
    if name in POPULATION_SCRIPTS:
        return QUICK_POPULATION
    if name == "coma":
        return QUICK_EPISODES
    if name in PLANNERS:
        return QUICK_PLANNER
    return QUICK_POLICY if name in POLICY_SCRIPTS else QUICK | (QUICK_MODEL if name == "omg_iql" else {})


def command_line(name, folder, options):
    """The words of a command: options by name, booleans as flags, tuples as several words."""
    words = [str(ROOT / f"{name}.py")]
    for key, value in {**quick_options(name), "run_root": folder, **options}.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return words


def train(name, folder, **options):
    """Runs a script in this process; returns the names that it had at the end."""
    return run_script(command_line(name, folder, options))


def run_script(words):
    """The same, with the words of its command line."""
    argv, hook, handlers = sys.argv, sys.excepthook, {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = words
    try:
        return runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, sys.excepthook = argv, hook
        torch.set_deterministic_debug_mode("default")
        torch.nn.modules.module._global_parameter_registration_hooks.clear()  # limits of sizes
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stopped(name, folder, **options):
    """Runs a script that stops after a round; returns the run's folder."""
    with pytest.raises(SystemExit, match=r"stopped at step [\d,]+; continue with --resume ") as stop:
        train(name, folder, **{"time_limit": 1e-9, **options})
    return Path(str(stop.value).split("--resume ")[1])


def resume_file(folder):
    """What a stopped run continues with, beside its checkpoint."""
    return folder / checkpoints.read_run(folder)["resume"]


def read_log(folder):
    """(step, value) of every scalar in the TensorBoard log of a run, by key."""
    events = EventAccumulator(str(folder)).Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def as_played(data, lengths, valid=None):
    """Episodes as a runner returns them, with what buffers and learners read."""
    valid = torch.ones_like(lengths, dtype=torch.bool) if valid is None else valid
    return Episodes(data, returns=data["reward"].sum(0), lengths=lengths, won=valid, valid=valid)


def make_learner(name, env, args, policies=2):
    """`policies`: how many policies the others may have, for scripts that tell them apart."""
    with_seats = name in ("qmix", "qtran", "coma", *POLICY_SCRIPTS)
    more = [range(policies)] if name == "belief_iql" else [env.n_agents] * with_seats
    return ALL_SCRIPTS[name].Learner(args, env, *more)


def write_run(folder, name, env, seed=0, scale=3, policies=2, **options):
    """The folder of a run that has learned nothing, with weights `scale` times as large as a new run's."""
    torch.manual_seed(seed)
    quick = QUICK if name in SCRIPTS else quick_options(name)
    args = ALL_SCRIPTS[name].Args(**{**quick, "env_id": env.name, "seed": seed, **options})
    networks = make_learner(name, env, args, policies).networks()
    content = {"algorithm": name, "env_id": args.env_id, "sizes": checkpoints.env_sizes(env), "args": asdict(args)}
    content["networks"] = {
        key: {k: scale * weights for k, weights in network.state_dict().items()} for key, network in networks.items()
    }
    content |= NOT_TRAINED
    folder.mkdir(parents=True)
    torch.save(content, folder / "checkpoint.pt")
    return folder


class TinyGame:
    """Two players go from stage to stage; at every stage a table has what both earn for their actions.

    It has what the scripts use of an environment (docs/environments.md), in plain torch.
    """

    name, n_agents, policies, team_reward, simulated = "tiny", 2, (), True, True
    matches_per_episode, leaving_ends, zero_sum, sides, default_others, return_scale = 1, False, False, None, (), 5.0
    device = torch.device("cpu")

    def __init__(self, payoff, following, num_envs):
        """(stages, actions, actions) numbers and next stages, -1 for the end"""
        self.payoff, self.following = torch.tensor(payoff, dtype=torch.float32), torch.tensor(following)
        self.num_envs, self.obs_dim, self.state_dim, self.episode_limit = num_envs, len(payoff), len(payoff), 2
        self.agent_state_dim, self.n_actions = self.obs_dim, len(payoff[0])
        self.stage, self.actions = torch.zeros(num_envs, dtype=torch.long), torch.zeros(num_envs, 2, dtype=torch.long)
        self.obs, self.reward = torch.zeros(num_envs, 2, self.obs_dim), torch.zeros(num_envs, 2)
        yes = torch.zeros(num_envs, dtype=torch.bool)
        self.terminated, self.truncated = yes.clone(), yes.clone()
        self.info = {
            "state": torch.zeros(num_envs, self.state_dim),
            "agent_state": self.obs,
            "avail": torch.ones(num_envs, 2, self.n_actions, dtype=torch.bool),
            "alive": torch.ones(num_envs, 2, dtype=torch.bool),
            "won": yes.clone(),
            "invalid": yes.clone(),
            "match_index": torch.zeros(num_envs, dtype=torch.long),
        }

    def look(self):
        self.info["state"].copy_(torch.eye(self.state_dim + 1)[self.stage][:, : self.state_dim])  # -1: zeros
        self.obs.copy_(self.info["state"].unsqueeze(1).expand_as(self.obs))
        self.terminated.copy_(self.stage < 0)

    def reset(self, mask=None):
        self.stage.masked_fill_(torch.ones_like(self.terminated) if mask is None else mask, 0)
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


def non_monotonic_game(num_envs):
    """Like that of the QTRAN paper: who does its part of the best joint action alone earns least of all.

    The penalty is so large that the best monotonic fit of all nine entries avoids it; that of the paper's -12 does not.
    """
    return TinyGame([[[8, -16, -16], [-16, 0, 0], [-16, 0, 0]]], [[[-1] * 3] * 3], num_envs)


def scramble(learner, scale):
    """Gives every network weights of its own, whose outputs are far from equal."""
    with torch.no_grad():
        for network in learner.networks().values():
            for weights in network.parameters():
                weights.copy_(torch.randn_like(weights) * scale)
    return learner
