"""Pre-trains what OMG infers subgoals with: a VAE of states, and the inference model (CVAE) on the next state.

The others play every seat. Both go into one file for `omg_iql.py --vae FILE`; without one, it does the same by itself.

    python pretrain_cvae.py --env-id 8m --cuda --team 7qmix1omg --pool "runs/8m__qmix__*"        docs/omg_iql.md
"""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from training.options import CommandArgs, TeamArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(TeamArgs, CommandArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment
    script: str = "omg_iql"  # the script whose networks are trained: omg_iql or a modified copy of it

    env_id: str = "3m"  # the environment: see envs.list_ids()
    team: str = "scripted"  # scripted (one learner, scripted partners), or such as 7qmix1omg
    persist_hidden: bool = False  # whether the hidden state outlasts a match, while the partners stay: one long episode
    num_envs: int | None = None  # matches at a time (default: 1024 on the GPU, 512 on the CPU)

    pretrain_timesteps: int | None = None  # steps to collect (default: 2 million on the GPU, 100,000 on the CPU)
    pretrain_updates: int = 1000  # updates of the VAE, and a tenth of the CVAE
    batch_size: int = 32  # episodes in an update of the CVAE
    model_learning_rate: float = 1e-3  # Adam's learning rate of the opponent model
    paper: bool = False  # whether to use the published subgoal settings, on our Q-learning: docs/omg_iql.md
    vae_kl_weight: float = 0.01  # weight of the VAE's KL divergence beside its error, a sum over features
    kl_weight: float = 0.001  # weight of the inference model's KL divergence beside its error
    latent_dim: int = 64  # size of a subgoal
    subgoal_input: Literal["others", "obs", "state"] = "others"  # encoded: others in view, the view, the global state
    predict: Literal["future", "view", "features"] = "future"  # decoded: the selected state, the view or features of it
    code: Literal["mean", "sample"] = "mean"  # what Q reads: the mean of the subgoal's Gaussian or a sample
    inference: Literal["cvae", "mlp"] = "cvae"  # the conditional VAE, or a network that predicts the subgoal itself


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import envs
from omg_iql import PAPER, PRETRAIN_FIELDS, PRETRAIN_TIMESTEPS
from training import checkpoints, play
from training.args import check_ranges, command, fill_in, from_command_line, resolve_device
from training.episodes import EpisodeRunner, RandomPlayer
from training.exits import UsageError, exit_on_signals
from training.log import Log, monotonic
from training.run import make_folder, set_up_torch, versions, write_json

if __name__ == "__main__":
    args = from_command_line(Args, paper=PAPER)
    exit_on_signals()
    positive = "num_envs pretrain_timesteps pretrain_updates batch_size model_learning_rate latent_dim"
    check_ranges(args, positive, "", "kl_weight vae_kl_weight teammate_epsilon")
    resolve_device(args)
    num_envs = 8 if not envs.is_simulated(args.env_id) else 1024 if args.cuda else 512
    fill_in(args, {"num_envs": num_envs, "pretrain_timesteps": PRETRAIN_TIMESTEPS[args.cuda]})
    args.freeze()
    try:
        script = checkpoints.load_script(args.script, f"--script {args.script}:", [f"{args.script}.py"])
    except ValueError as error:
        raise UsageError(error) from None
    env = script.make_env(args, args.num_envs, set_up_torch(args), "pre-training")
    team = script.make_team(args, env, "pre-training", teammates_everywhere=True)
    if (team.policy_id < 0).any():
        raise UsageError(f"--team {args.team} has no others to watch; omg_iql.py pre-trains by itself")
    model = script.OpponentModel(args, env)
    folder, started = make_folder(args, STARTED), monotonic(STARTED)
    writer = Log(args, folder)
    fields = (*PRETRAIN_FIELDS, *["state"] * (args.subgoal_input == "state"))
    runner = EpisodeRunner(env, team, RandomPlayer(), fields, args.cudagraphs)
    errors = script.Pretraining(args, model, runner).run(writer)
    content = {"algorithm": args.script, "env_id": args.env_id, "args": asdict(args), "errors": errors}
    content |= {"requirements": script.requirements(args, env), "networks": {"model": model.state_dict()}}
    results = {"command": " ".join(sys.argv), "seconds": time.monotonic() - started, **errors}
    results |= {"args": asdict(args), "versions": versions()}
    if not checkpoints.write(content, folder / "vae.pt") or not write_json(results, folder / "results.json"):
        raise SystemExit(1)
    if args.subgoal_input != "state" and env.simulated and hasattr(env, "scene"):
        picture = play.picture_of_views(
            runner, lambda obs: model.views(model.vae.encode(model.states({}, obs))[0], obs)
        )
        writer.add_image("pretrain/rebuilt", picture, args.pretrain_updates)
    writer.close()
    same = ("paper", "env_id", "n_agents", "team", "pool", "latent_dim", "subgoal_input", "predict")
    print("use it with:", command(args, PAPER if args.paper else {}, same, vae=folder / "vae.pt"))
