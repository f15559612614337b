"""The options of run, environment and team, the same in every script; --help, which answers before the slow imports.

    @dataclass
    class Args(TeamArgs, RunArgs):
        exp_name: str = Path(__file__).stem
        env_id: str = "3m"
        gamma: float = 0.97  # discount factor

Nothing here imports torch.
"""

import sys
from dataclasses import dataclass

import tyro


@dataclass
class CommandArgs:
    exp_name: str = ""  # the name of this experiment (default: that of the script)
    seed: int = 1  # the seed of all random numbers
    torch_deterministic: bool = True  # whether torch uses deterministic algorithms only
    cuda: bool = False  # whether to use the GPU; if there is none, the run says so and uses the CPU
    cudagraphs: bool = True  # whether CUDA graphs replay steps and updates; without: slower, but a loss can print
    track: bool = False  # whether Weights and Biases mirrors the TensorBoard logs
    wandb_project_name: str = "omg-marl"  # wandb's project
    wandb_entity: str | None = None  # wandb's entity (team)
    wandb_group: str | None = None  # wandb's group of runs
    run_root: str = "runs"  # the folder in which run folders are made

    size_limit = None  # no option: what limits the networks of a resumed run, until these are loaded

    def freeze(self):
        """From here on the options are read-only. What a run finds out by itself is no option."""
        object.__setattr__(self, "_frozen", True)

    def __setattr__(self, name, value):
        if getattr(self, "_frozen", False):
            raise AttributeError(f"the options are read-only once they are checked: {name} = {value!r}")
        super().__setattr__(name, value)


@dataclass
class RunArgs(CommandArgs):
    capture_video: bool = False  # whether to save a GIF of a match of the final policy
    checkpoint_interval: float = 120.0  # seconds between checkpoints, at least 10 times what one takes; 0: every round
    keep_checkpoints: tuple[float, ...] = ()  # shares of the run after which a copy is kept for pools: 0.1 in at-0.1
    resume: str | None = None  # a run folder to continue; other arguments must be as they were
    init: str | None = None  # a run folder whose networks this run starts from
    time_limit: float | None = None  # seconds after which the run saves and stops (it can be resumed)
    eval_interval: int | None = None  # steps between greedy evaluations (default: total / 50; PyMARL: 10,000)
    eval_episodes: int = 128  # episodes of an evaluation (PyMARL: 32)
    final_eval_episodes: int = 512  # episodes of the last evaluation
    log_interval: float = 1.0  # seconds between lines of the log


@dataclass
class TeamArgs:
    env_id: str = "3m"  # the environment: see envs.list_ids()
    n_agents: int | None = None  # number of agents, where the environment leaves it open
    team: str = "self"  # self (all seats learn), scripted (one learner, scripted partners), or such as 7qmix1learner
    pool: tuple[str, ...] = ()  # run folders (or patterns) and scripted policies that the team is drawn from
    seat: str = "rotate"  # the seat of a single learner: rotate, random or a number
    mix_teammates: bool = False  # whether each team-mate draws a policy of its own, or one is drawn for a match
    teammate_epsilon: float | tuple[float, float] = 0.0  # chance of a random action of a team-mate, or a range of it
    matches_per_partner: int = 1  # matches in a row with the same team-mates or opponents


def answer_help(args_class):
    """Prints the options and ends the program, if that is what the command line asks for."""
    if {"-h", "--help"} & set(sys.argv):
        tyro.cli(args_class)
