"""Pre-trains what OMG infers subgoals with: a VAE of states, and the inference model's first guess at the future.

The others play every seat for a while; the VAE learns to encode the states they meet, and the inference model (CVAE)
to expect the code of the next state from the past. Both go into one file for `omg_iql.py --vae FILE`.

    python pretrain_cvae.py --env-id 8m --cuda --team 7qmix1omg --pool "runs/8m__qmix__*"        docs/pretrain_cvae.md
"""

import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

STARTED = time.time()  # before the imports that take seconds


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything that is random"""
    torch_deterministic: bool = True
    """whether torch keeps to algorithms that give the same result every time"""
    cuda: bool = False
    """whether to use the GPU; if there is none, the run says so and uses the CPU"""
    track: bool = False
    """whether Weights and Biases mirrors the TensorBoard logs"""
    wandb_project_name: str = "omg-marl"
    """wandb's project"""
    wandb_entity: str | None = None
    """wandb's entity (team)"""
    wandb_group: str | None = None
    """wandb's group of runs"""
    run_root: str = "runs"
    """the folder that run folders are made in"""

    env_id: str = "3m"
    """the environment: see envs.list_ids()"""
    n_agents: int | None = None
    """number of agents, where the environment leaves it open"""
    team: str | None = None
    """who sits where, such as 7qmix1omg, 3NH1omg (default: scripted policies)"""
    pool: tuple[str, ...] = ()
    """run folders of iql.py, vdn.py or qmix.py (patterns will do) that the team's names are found in"""
    seat: str = "rotate"
    """the learner's seat, whose view is encoded: rotate, random or a number"""
    mix_teammates: bool = False
    """whether every other seat draws its own policy, or one is drawn for all of a match"""
    teammate_epsilon: float = 0.0
    """the others' chance of a random action (networks only)"""
    num_envs: int | None = None
    """matches played at a time (default: 1024 on the GPU, 64 on the CPU, 8 of the real game)"""

    pretrain_timesteps: int | None = None
    """environment steps to collect (default: 2 million on the GPU, 100,000 on the CPU)"""
    pretrain_updates: int = 1500
    """updates of the VAE, at most; it stops early when the held-out error no longer falls"""
    warm_up: bool = True
    """whether the inference model is trained too, on the next state"""
    batch_size: int = 32
    """episodes in an update of the inference model"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate"""
    kl_weight: float = 0.001
    """weight of the divergence beside the reconstruction"""
    latent_dim: int = 64
    """size of a subgoal"""
    subgoal_input: Literal["obs", "state"] = "obs"
    """what subgoals are codes of: the learner's view or the global state"""
    inference: Literal["cvae", "mlp"] = "cvae"
    """the inference model: the conditional VAE, or a network that predicts the subgoal itself"""


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    tyro.cli(Args)  # answers and leaves, before the imports that take seconds

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from tqdm import tqdm  # noqa: E402

import envs  # noqa: E402
from envs.team import Team, sizes_of  # noqa: E402

CHUNK = 8  # steps between two looks at whether all matches are over


def check(args):
    """Refuses values that make no sense, with what is allowed, and fills in those that depend on the device."""
    for name in (
        "num_envs",
        "pretrain_timesteps",
        "pretrain_updates",
        "batch_size",
        "model_learning_rate",
        "latent_dim",
    ):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise SystemExit(f"--{name.replace('_', '-')} is above 0, not {getattr(args, name)}")
    for name in ("kl_weight", "teammate_epsilon"):
        if not 0 <= getattr(args, name) <= 1:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 to 1, not {getattr(args, name)}")
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and not args.env_id.startswith("sc2/"):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False
    usual = {"pretrain_timesteps": (2_000_000, 100_000)}
    usual["num_envs"] = (8, 8) if args.env_id.startswith("sc2/") else (1024, 64)
    for name, (on_gpu, on_cpu) in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.cuda else on_cpu)


def make_env(args, num_envs, device, seed):
    try:
        return envs.make(args.env_id, num_envs=num_envs, device=device, seed=seed, n_agents=args.n_agents, check=False)
    except ValueError as error:
        raise SystemExit(f"--env-id {args.env_id}: {error}") from None


def make_team(args, env, seed, understudy=False):
    try:
        return Team(
            env, args.team, ("omg", "iql_omg", "learner"), args.pool, args.seat, args.mix_teammates,
            args.teammate_epsilon, seed, understudy,
        )  # fmt: skip
    except ValueError as error:
        raise SystemExit(f"--team {args.team}: {error}") from None


# ALGO LOGIC: networks
class SharedGRU(nn.GRU):
    """A GRU for all seats."""

    def forward(self, x, h):  # (time, matches, seats, inputs), (matches, seats, hidden)
        rows, state = x.flatten(1, 2), h.flatten(0, 1)
        if len(x) == 1:
            y = torch.gru_cell(rows[0], state, *self._flat_weights)  # at a single step cuDNN is slow
        else:
            y, _ = super().forward(rows, state.unsqueeze(0))
        return y.view(*x.shape[:-1], -1)  # (time, matches, seats, hidden)


class Gaussian(nn.Module):
    """(mean, log variance) of a latent code."""

    def __init__(self, inputs, latent):
        super().__init__()
        self.mean, self.log_variance = nn.Linear(inputs, latent), nn.Linear(inputs, latent)

    def forward(self, x):
        return self.mean(x), self.log_variance(x).clamp(-10.0, 10.0)


def sample(mean, log_variance):
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)


def divergence(mean, log_variance, other_mean, other_log_variance):
    """KL(N(mean, variance) || N(other)), dimension by dimension."""
    gap = (mean - other_mean).square() + torch.exp(log_variance)
    return 0.5 * (other_log_variance - log_variance + gap * torch.exp(-other_log_variance) - 1)


class StateVAE(nn.Module):
    """Codes of states: an MLP of 128 and 128 each way."""

    def __init__(self, inputs, latent):
        super().__init__()

        def layers(first):
            return nn.Sequential(nn.Linear(first, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU())

        self.encoder, self.code = layers(inputs), Gaussian(128, latent)
        self.decoder, self.out = layers(latent), nn.Linear(128, inputs)

    def encode(self, state):
        return self.code(self.encoder(state))

    def decode(self, code):
        return self.out(self.decoder(code))


class Inference(nn.Module):
    """The subgoal the past speaks for: a GRU over what was seen and done, an encoder, and a decoder to train it by."""

    def __init__(self, env, latent, memory=96):
        super().__init__()
        self.memory, self.actions, self.ego_first = memory, env.n_actions, env.ego_first
        self.past = SharedGRU(env.obs_dim + env.n_agents * env.n_actions, memory)
        self.now = nn.Linear(env.obs_dim, 32)
        self.encoder, self.code = nn.Linear(32 + memory, 64), Gaussian(64, latent)
        self.decoder, self.out = nn.Linear(latent + memory, 128), nn.Linear(128, env.obs_dim)
        self.register_buffer("seats", torch.arange(env.n_agents), persistent=False)
        self.register_buffer("choices", torch.arange(env.n_actions), persistent=False)

    def remember(self, obs, actions, seat, h):
        """The past before each step from the observation and everybody's actions one step earlier (-1: none yet)."""
        first = seat.unsqueeze(-1)  # own action, then the others' in the order in which the observation has them
        order = (first + self.seats) % len(self.seats)
        if not self.ego_first:
            order = torch.cat((first, self.seats[:-1] + (self.seats[:-1] >= first).long()), -1)
        order = order.expand(*obs.shape[:-1], -1)  # (time, matches, seats, agents)
        actions = actions.unsqueeze(-2).expand_as(order).gather(-1, order)
        done = (actions.unsqueeze(-1) == self.choices).to(obs.dtype).flatten(-2)
        return self.past(torch.cat((obs, done), -1), h)

    def forward(self, obs, memory):
        """(mean, log variance) of the subgoal"""
        x = F.relu(self.now(obs))
        return self.code(F.relu(self.encoder(torch.cat((x, memory), -1))))

    def reconstruct(self, code, memory):
        return self.out(F.relu(self.decoder(torch.cat((code, memory), -1))))


class Graphed:
    """Calls a function without arguments; on CUDA the second call captures it as a graph, later ones replay that."""

    def __init__(self, function, device):
        self.function, self.captures, self.graph, self.calls = function, device.type == "cuda", None, 0

    def __call__(self):
        self.calls += 1
        if not self.captures:
            self.function()
        elif self.calls == 1:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.function()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.function()
            self.graph.replay()


class Rollout:
    """Plays whole episodes of all matches in lock step, every seat by the others; `story` keeps what is seen."""

    def __init__(self, env, team, kept):
        self.env, self.team, device = env, team, env.device
        rows = -(-env.episode_limit // CHUNK) * CHUNK + 1
        fields = {"action": env.actions, **env.info, "obs": team.mine(env.obs)}
        self.story = {name: fields[name].new_zeros((rows, *fields[name].shape)) for name in kept}
        self.story["seat"] = team.own.unsqueeze(0)  # the same at all times
        self.t, self.last_action = torch.zeros(1, dtype=torch.long, device=device), torch.zeros_like(env.actions)
        self.running, self.lengths = torch.zeros_like(env.terminated), torch.zeros_like(env.actions[:, 0])
        self.chunk = Graphed(self.steps, device) if env.simulated else self.steps
        env.reset()

    def write(self, when, **values):
        for name in self.story.keys() & values.keys():
            self.story[name].index_copy_(0, when, values[name].unsqueeze(0))

    @torch.no_grad()
    def steps(self):
        for _ in range(CHUNK):
            action = self.team.complete(torch.zeros_like(self.team.own), self.last_action)
            obs, _, terminated, truncated, info = self.env.step(action)
            self.write(self.t, action=action)
            self.t += 1
            self.write(self.t, **{**info, "obs": self.team.mine(obs)})
            self.lengths += self.running
            self.running &= ~(terminated | truncated)
            self.last_action.copy_(action)

    def play(self):
        """One episode of every match: (lengths, valid), there until the next call."""
        self.team.draw()
        obs, info = self.env.reset()
        for tensor in (self.t, self.lengths):
            tensor.zero_()
        self.last_action.fill_(-1)
        self.running.fill_(True)
        self.write(self.t, **{**info, "obs": self.team.mine(obs)})
        for _ in range(0, self.env.episode_limit, CHUNK):
            self.chunk()
            if not self.running.any():
                break
        return self.lengths, ~info["invalid"]


def spread(mask, values):
    """The mean of the values that the mask selects."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class Model:
    """The VAE and the inference model."""

    def __init__(self, args, env):
        seen = env.obs_dim if args.subgoal_input == "obs" else env.state_dim
        self.model = {
            "vae": StateVAE(seen, args.latent_dim).to(env.device),
            "inference": Inference(env, args.latent_dim).to(env.device),
        }

    def infer(self, obs, everybody, seat):
        """(mean, log variance, memory) at every step of episodes: (steps + 1, matches, own seats, ...)"""
        before = torch.cat((torch.zeros_like(obs[:1]), obs[:-1]))
        done = torch.cat((torch.full_like(everybody[:1], -1), everybody))
        inference = self.model["inference"]
        start = torch.zeros(*seat.shape, inference.memory, device=obs.device)
        memory = inference.remember(before, done, seat, start)
        return *inference(obs, memory), memory


def pretrain(args, learner, rollout, writer):
    """Trains the VAE on states met while the others play every seat, then the inference model to expect the next state.

    Returns the errors held out: {"recon": ..., "kl": ..., "inference": ...}.
    """
    stories, steps = [], 0
    bar = tqdm(total=args.pretrain_timesteps, unit_scale=True, disable=not sys.stderr.isatty(), desc="playing")
    while steps < args.pretrain_timesteps:
        lengths, valid = rollout.play()
        bar.update(int(lengths.sum()))
        steps += int(lengths.sum())
        rows = int(lengths.max()) + 1
        stories.append({name: values[:rows, valid].clone() for name, values in rollout.story.items()})
        stories[-1]["lengths"] = lengths[valid].clone()
    bar.close()
    vae, inference = learner.model["vae"], learner.model["inference"]
    optimizer = torch.optim.Adam(vae.parameters(), args.model_learning_rate)
    held_out = stories.pop() if len(stories) > 1 else stories[0]

    def view(story):
        """(states, own seats, features) that the learner's unit is there to see."""
        seat, rows = story["seat"][0], len(story["obs"])
        there = story["alive"].gather(-1, seat.expand(rows, -1, -1))
        there &= torch.arange(rows, device=seat.device).view(-1, 1, 1) <= story["lengths"].unsqueeze(-1)
        seen = (
            story["obs"]
            if args.subgoal_input == "obs"
            else story["state"].unsqueeze(2).expand(-1, -1, seat.shape[1], -1)
        )
        return seen, there

    def vae_loss(states):
        mean, log_variance = vae.encode(states)
        recon = (vae.decode(sample(mean, log_variance)) - states).square().mean(-1).mean()
        kl = divergence(mean, log_variance, torch.zeros_like(mean), torch.zeros_like(mean)).sum(-1).mean()
        return recon + args.kl_weight * kl, recon, kl

    states = torch.cat([seen[there] for seen, there in map(view, stories)])
    test_states = view(held_out)[0][view(held_out)[1]][:8192]
    best, patience = float("inf"), 0
    for update in tqdm(range(args.pretrain_updates), disable=not sys.stderr.isatty(), desc="VAE"):
        loss, _, _ = vae_loss(states[torch.randint(len(states), (1024,), device=states.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 99:
            with torch.no_grad():
                error, recon, kl = (number.item() for number in vae_loss(test_states))
            writer.add_scalar("pretrain/recon", recon, update)
            writer.add_scalar("pretrain/kl", kl, update)
            patience = 0 if error < 0.99 * best else patience + 1
            best = min(best, error)
            if patience == 3:
                break
    vae.requires_grad_(False)

    optimizer = torch.optim.Adam(inference.parameters(), args.model_learning_rate)

    def inference_loss(story, chosen):
        obs, seat = story["obs"][:, chosen], story["seat"][0][chosen]
        seen, there = (values[:, chosen] for values in view(story))
        mean, log_variance, memory = learner.infer(obs, story["action"][:-1, chosen], seat)
        goal = vae.encode(seen[1:])
        kl = divergence(mean[:-1], log_variance[:-1], *goal).sum(-1)
        recon = (inference.reconstruct(sample(mean, log_variance), memory)[:-1] - obs[:-1]).square().mean(-1)
        if args.inference == "mlp":
            return spread(there[1:], (mean[:-1] - goal[0]).square().mean(-1))
        return spread(there[1:], recon + args.kl_weight * kl)

    for update in tqdm(range(args.pretrain_updates // 5 * args.warm_up), disable=not sys.stderr.isatty(), desc="CVAE"):
        story = stories[update % len(stories)]
        loss = inference_loss(story, torch.randint(story["obs"].shape[1], (args.batch_size,), device=states.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, recon, kl = vae_loss(test_states)
        expected = inference_loss(held_out, torch.arange(min(held_out["obs"].shape[1], 64), device=states.device))
    return {"recon": recon.item(), "kl": kl.item(), "inference": expected.item(), "states": len(states)}


@torch.no_grad()
def picture(args, env, learner, team):
    """A match in the middle, with the places that the VAE gives back of what the learner's seat sees."""
    obs, _ = env.reset()
    for _ in range(min(10, env.episode_limit // 2)):
        obs, *_ = env.step(team.complete(torch.zeros_like(team.own), env.actions))
    own = team.mine(obs)
    rebuilt = learner.model["vae"].decode(learner.model["vae"].encode(own)[0])
    agent, (places, _), (_, seen) = int(team.own[0, 0]), env.places(rebuilt), env.places(own)
    places = places[0, 0]
    if hasattr(env, "units"):
        places = places + torch.stack([env.units()[axis][0, agent] for axis in ("x", "y")])
    goals = [(agent, *place) for place, visible in zip(places.tolist(), seen[0, 0].tolist()) if visible]
    return env.render(goals=goals, sight=agent)


if __name__ == "__main__":
    args, started = tyro.cli(Args), STARTED
    check(args)
    run = Path(args.run_root) / f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(started)}"
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cuda" if args.cuda else "cpu")
    env = make_env(args, args.num_envs, device, args.seed)
    team = make_team(args, env, args.seed, understudy=True)
    learner = Model(args, env)
    rollout = Rollout(env, team, ["obs", "alive", "action"] + ["state"] * (args.subgoal_input == "state"))
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, group=args.wandb_group, name=run.name,
            id=run.name, sync_tensorboard=True, config=asdict(args), save_code=True,
        )  # fmt: skip
    writer = SummaryWriter(run)
    print(
        f"{run}: {args.env_id}, {env.n_agents} agents, {args.num_envs} matches at a time on the {device.type.upper()}"
    )
    errors = pretrain(args, learner, rollout, writer)

    fits = {**sizes_of(env), "latent_dim": args.latent_dim, "subgoal_input": args.subgoal_input}
    model = {name: network.state_dict() for name, network in learner.model.items()}
    content = {
        "algorithm": Path(__file__).stem,
        "env_id": args.env_id,
        "fits": fits,
        "model": model,
        "args": asdict(args),
    }
    part = run / "vae.part"
    torch.save({**content, "errors": errors}, part)
    os.replace(part, run / "vae.pt")
    results = {"command": " ".join(sys.argv), "seconds": time.time() - started, **errors, "args": asdict(args)}
    results["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    (run / "results.json").write_text(json.dumps(results, indent=1))
    if args.subgoal_input == "obs" and env.simulated and hasattr(env, "places"):
        one = make_env(args, 1, device, args.seed + 1)
        image = picture(args, one, learner, make_team(args, one, args.seed + 1, understudy=True))
        writer.add_image("pretrain/rebuilt", image, dataformats="HWC")
    writer.close()
    print(
        "held-out error {recon:.4f}, divergence {kl:.2f}, inference {inference:.4f}, {states:,} states".format(**errors)
    )
    print(
        f"{time.time() - started:.1f} s; use it with: python omg_iql.py --env-id {args.env_id} --vae {run / 'vae.pt'}"
    )
