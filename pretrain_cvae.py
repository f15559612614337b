"""Pre-trains what OMG infers subgoals with: a VAE of states, and the inference model (CVAE) on the next state.

The others play every seat. Both go into one file for `omg_iql.py --vae FILE`; without one, it does the same by itself.

    python pretrain_cvae.py --env-id 8m --cuda --team 7qmix1omg --pool "runs/8m__qmix__*"        docs/omg_iql.md
"""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from training.options import CommandArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(CommandArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment
    script: str = "omg_iql"  # the script whose networks are trained: omg_iql or a modified copy of it

    env_id: str = "3m"  # the environment: see envs.list_ids()
    n_agents: int | None = None  # number of agents, where the environment leaves it open
    team: str = "scripted"  # scripted (one learner among scripted others), or such as 7qmix1omg
    pool: tuple[str, ...] = ()  # run folders (or patterns) and scripted policies that the team is drawn from
    seat: str = "rotate"  # the learner's seat among others: rotate, random or a number
    mix_teammates: bool = False  # whether each other seat draws its own policy, or one is drawn for a whole match
    teammate_epsilon: float | tuple[float, float] = 0.0  # chance of a random action of the others, or a range of it
    encounter: int = 1  # matches in a row with the same others before new ones are drawn
    keep_memory: bool = False  # whether the learner remembers the matches of an encounter, which are one episode then
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

import torch

import envs
from training import checkpoints
from training.args import check_ranges, command, fill_in, from_command_line, resolve_device
from training.episodes import EpisodeRunner, RandomPlayer, preserved_rng, rng_state, set_rng_state
from training.exits import UsageError, exit_on_signals
from training.log import Log, Progress, monotonic
from training.metrics import masked_mean
from training.run import make_folder, set_up_torch, versions, write_json

TIMESTEPS = (100_000, 2_000_000)  # of pre-training by default, on the CPU and on the GPU
PAPER = {"subgoal_input": "obs", "selector": "value", "predict": "view", "code": "sample", "q_gradient": False,
         "inference_weight": 1.0, "bootstrap_subgoal": "same", "pretrain_updates": 5000}  # fmt: skip
FIELDS = ("obs", "alive", "visible_last_action")


class Pretraining:
    """Trains the VAE on the states of played episodes, then the CVAE to expect the next state.
    A run that is stopped goes on after the same update; the episodes are not saved but played again."""

    def __init__(self, args, model, runner):
        self.args, self.model, self.runner = args, model, runner
        self.total = args.pretrain_updates + (0 if args.paper else args.pretrain_updates // 10)
        parameters = model.vae.parameters(), [p for n, p in model.named_parameters() if not n.startswith("vae.")]
        self.optimizers = [torch.optim.Adam(group, args.model_learning_rate, fused=True) for group in parameters]
        self.progress = {"update": 0}
        self.start, self.rng = {"rng": rng_state(args.cuda), "runner": runner.state_dict()}, None  # before the episodes

    def run(self, log, after_update=lambda: None):
        """Returns the held-out errors: {"recon": ..., "kl": ..., "inference": ..., "states": number of states}."""
        args, model, progress = self.args, self.model, self.progress
        set_rng_state(self.start["rng"])
        self.runner.load_state_dict(self.start["runner"])
        self.runner.should_stop = getattr(self, "should_stop", None)  # of the run that this is part of
        with Progress("Pre-training, play of the others: ", args.pretrain_timesteps, "steps") as shown:
            *rounds, held_out = self.runner.collect(args.pretrain_timesteps, shown.show)
        states = torch.cat([model.states(episodes, episodes["obs"])[episodes["mask"]] for episodes in rounds])
        test_states = model.states(held_out, held_out["obs"])[held_out["mask"]][:8192]
        if not args.paper:  # features that are 0 or 1, and both of them
            model.vae.binary.copy_(((states == 0) | (states == 1)).all(0) & (states.amin(0) < states.amax(0)))
        if progress["update"] and self.rng is not None:  # before the first update it follows from the episodes
            set_rng_state(self.rng)
        errors = {}
        for name, first, last in (("VAE", 0, args.pretrain_updates), ("CVAE", args.pretrain_updates, self.total)):
            model.vae.requires_grad_(name == "VAE")
            with Progress(f"Pre-training, {name}: ", last - first, "updates", progress["update"] - first) as shown:
                while progress["update"] < last:
                    if name == "VAE":
                        self.update_vae(states)
                    else:
                        self.update_cvae(rounds[progress["update"] % len(rounds)])
                    if progress["update"] % 100 == 0:
                        errors = self.errors(test_states, held_out)
                        for key, error in errors.items():
                            log.add_scalar(f"pretrain/{key}", error, progress["update"])
                    shown.show(progress["update"] - first, ", ".join(f"{k} {e:.4f}" for k, e in errors.items()))
                    after_update()
        return self.errors(test_states, held_out) | {"states": len(states)}

    @torch.no_grad()
    def errors(self, states, episodes):
        with preserved_rng(states.device):
            _, recon, kl = vae_loss(self.args, self.model.vae, states)
            inference = cvae_loss(self.args, self.model, episodes, slice(64))
        return {"recon": recon.item(), "kl": kl.item(), "inference": inference.item()}

    def update_vae(self, states):
        """Its learning rate rises at first and falls to 0: at a constant one it would take thrice the updates."""
        done = self.progress["update"] / self.args.pretrain_updates
        self.optimizers[0].param_groups[0]["lr"] = 6 * self.args.model_learning_rate * min(10 * done + 0.01, 1 - done)
        batch = states[torch.randint(len(states), (1024 if self.args.cuda else 256,), device=states.device)]
        self.step(self.optimizers[0], vae_loss(self.args, self.model.vae, batch)[0])

    def update_cvae(self, episodes):
        matches = torch.randint(episodes["obs"].shape[1], (self.args.batch_size,), device=episodes["obs"].device)
        self.step(self.optimizers[1], cvae_loss(self.args, self.model, episodes, matches))

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.progress["update"] += 1

    def state_dict(self):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"rng": rng_state(self.args.cuda), "start": self.start, "optimizers": optimizers, **self.progress}

    def load_state_dict(self, state):
        for matches in (state["start"]["runner"], self.runner.state_dict()):  # what does not fit is refused now
            self.runner.load_state_dict(matches)
        self.rng, self.start = state["rng"], state["start"]
        checkpoints.check_rng_states(self.rng, self.start["rng"])
        self.progress = {name: checkpoints.number(state, name, type(old)) for name, old in self.progress.items()}
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            checkpoints.load_optimizer(optimizer, saved)


def vae_loss(args, vae, states):
    """(the loss, the mean error of a feature, the KL divergence)"""
    error, kl = vae.errors(states)
    recon, kl = error.mean(), kl.sum(-1).mean()
    weight = args.kl_weight if args.paper else args.vae_kl_weight / states.shape[-1]
    return recon + weight * kl, recon, kl


def cvae_loss(args, model, episodes, matches):
    """The CVAE's loss over some matches, with the next state as the subgoal."""
    episodes = {name: values[:, matches] for name, values in episodes.items()}
    obs = torch.where(episodes["mask"].unsqueeze(-1), episodes["obs"], 0.0)
    subgoal, h, code = model.unroll(obs, episodes["visible_last_action"], episodes["seat"][0])
    state = model.states(episodes, obs)[1:]
    code, target = [values[:-1] for values in code], model.vae.encode(state)
    error, kl = model.errors(obs[:-1], subgoal[:-1], h[:-1], code, target, state)
    return masked_mean(episodes["mask"][1:], error + args.kl_weight * kl.sum(-1))


if __name__ == "__main__":
    args = from_command_line(Args, paper=PAPER)
    exit_on_signals()
    positive = "num_envs encounter pretrain_timesteps pretrain_updates batch_size model_learning_rate latent_dim"
    check_ranges(args, positive, "", "kl_weight vae_kl_weight teammate_epsilon")
    resolve_device(args)
    num_envs = 8 if not envs.is_simulated(args.env_id) else 1024 if args.cuda else 512
    fill_in(args, {"num_envs": num_envs, "pretrain_timesteps": TIMESTEPS[args.cuda]})
    args.freeze()
    try:
        script = checkpoints.load_script(args.script, f"--script {args.script}:", [f"{args.script}.py"])
    except ValueError as error:
        raise UsageError(error) from None
    env = script.make_env(args, args.num_envs, set_up_torch(args), "pre-training")
    team = script.make_team(args, env, "pre-training", stand_in=True)
    if (team.policy_id < 0).any():
        raise UsageError(f"--team {args.team} has no others to watch; omg_iql.py pre-trains by itself")
    model = script.OpponentModel(args, env)
    folder, started = make_folder(args, STARTED), monotonic(STARTED)
    writer = Log(args, folder)
    fields = (*FIELDS, *["state"] * (args.subgoal_input == "state"))
    runner = EpisodeRunner(env, team, RandomPlayer(), fields, args.cudagraphs)
    errors = Pretraining(args, model, runner).run(writer)
    content = {"algorithm": args.script, "env_id": args.env_id, "args": asdict(args), "errors": errors}
    content |= {"requirements": script.requirements(args, env), "networks": {"model": model.state_dict()}}
    results = {"command": " ".join(sys.argv), "seconds": time.monotonic() - started, **errors}
    results |= {"args": asdict(args), "versions": versions()}
    if not checkpoints.write(content, folder / "vae.pt") or not write_json(results, folder / "results.json"):
        raise SystemExit(1)
    if args.subgoal_input != "state" and env.simulated and hasattr(env, "scene"):
        writer.add_image("pretrain/rebuilt", script.reconstruction(runner, model), args.pretrain_updates)
    writer.close()
    same = ("paper", "env_id", "n_agents", "team", "pool", "latent_dim", "subgoal_input", "predict")
    print("use it with:", command(args, PAPER if args.paper else {}, same, vae=folder / "vae.pt"))
