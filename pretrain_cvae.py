"""Pre-trains what OMG infers subgoals with: a VAE of states, and the inference model's first guess at the future.

The others play every seat for a while; the VAE learns to encode the states they meet, and the inference model (CVAE)
to expect the code of the next state from the past. Both go into one file for `omg_iql.py --vae FILE`.

    python pretrain_cvae.py --env-id 8m --cuda --team 7qmix1omg --pool "runs/8m__qmix__*"        docs/pretrain_cvae.md
"""

import gc
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
    team: str = "scripted"
    """who sits where: scripted (one learner among scripted others), or such as 7qmix1omg"""
    pool: tuple[str, ...] = ()
    """run folders of iql.py, vdn.py or qmix.py (patterns will do) that the team's names are found in"""
    seat: str = "rotate"
    """the learner's seat among others: rotate, random or a number"""
    mix_teammates: bool = False
    """whether every other seat draws its own policy, or one is drawn for all of a match"""
    teammate_epsilon: float = 0.0
    """the others' chance of a random action (networks only)"""
    num_envs: int | None = None
    """matches played at a time (default: 1024 on the GPU, 64 or for one seat 512 on the CPU, 8 of the real game)"""

    pretrain_timesteps: int | None = None
    """environment steps to collect (default: 2 million on the GPU, 100,000 on the CPU)"""
    pretrain_updates: int = 1500
    """updates of the VAE, at most; it stops early when the held-out error no longer falls"""
    warm_up: bool = True
    """whether the inference model is trained too, on the next state"""
    batch_size: int = 32
    """episodes in an update of the inference model"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate for the opponent model"""
    kl_weight: float = 0.001
    """weight of the divergence beside the reconstruction, in VAE and inference model"""
    latent_dim: int = 64
    """size of a subgoal"""
    subgoal_input: Literal["obs", "state"] = "obs"
    """what subgoals are codes of: the learner's view or the global state"""
    inference: Literal["cvae", "mlp"] = "cvae"
    """the inference model: the conditional VAE, or a network that predicts the subgoal itself"""
    reconstruct: Literal["obs", "features"] = "obs"
    """what the inference model reconstructs: the observation (paper) or its learned features (released code)"""


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
    positive = "num_envs pretrain_timesteps pretrain_updates batch_size model_learning_rate latent_dim"
    for name in positive.split():
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
    usual["num_envs"] = (8, 8) if args.env_id.startswith("sc2/") else (1024, 64 if args.team == "self" else 512)
    for name, (on_gpu, on_cpu) in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.cuda else on_cpu)


def make_env(args, num_envs, device, seed):
    try:
        return envs.make(args.env_id, num_envs=num_envs, device=device, seed=seed, n_agents=args.n_agents, check=False)
    except ValueError as error:
        raise SystemExit(f"--env-id {args.env_id}: {error}") from None


def make_team(args, env, seed, understudy=False):
    if env.n_agents == 1:
        raise SystemExit("--n-agents 1: there is nobody to model")
    others = (args.pool, args.seat, args.mix_teammates, args.teammate_epsilon)
    try:
        return Team(env, args.team, ("omg", "iql_omg", "learner"), *others, seed, understudy)
    except ValueError as error:
        raise SystemExit(f"--team {args.team}: {error}") from None


# ALGO LOGIC: networks
class Unroll(torch.autograd.Function):
    """All states of a GRU, from what its inputs bring to the gates: cuDNN's, with a quicker gradient of the weights.

    cuDNN's own takes most of a backward pass. What it gives for the gates is enough to have that of the weights from.
    """

    @staticmethod
    def forward(ctx, gates, h, weight, bias):  # (time, rows, 3 * hidden), (rows, hidden)
        with torch.enable_grad():
            gates, h = gates.detach().requires_grad_(), h.detach().requires_grad_()
            parts = torch.eye(len(bias), device=h.device), weight.detach(), torch.zeros_like(bias), bias.detach()
            flat = torch.cat([part.flatten() for part in parts])  # cuDNN wants them in one piece
            weights = [w.view_as(part) for w, part in zip(flat.split([part.numel() for part in parts]), parts)]
            y, _ = torch.gru(gates, h.unsqueeze(0), weights, True, 1, 0.0, True, False, False)
        ctx.kept = gates, h, y, weight, bias
        return y.detach()

    @staticmethod
    def backward(ctx, gradient):
        gates, h, y, weight, bias = ctx.kept
        d_gates, d_h = torch.autograd.grad(y, (gates, h), gradient)
        hidden, before = h.shape[-1], torch.cat((h.unsqueeze(0), y[:-1]))
        reset = torch.sigmoid(gates[..., :hidden] + F.linear(before, weight[:hidden], bias[:hidden]))
        d_hidden = torch.cat((d_gates[..., : 2 * hidden], d_gates[..., 2 * hidden :] * reset), -1).flatten(0, 1)
        return d_gates, d_h, d_hidden.T @ before.flatten(0, 1), d_hidden.sum(0)


class SharedGRU(nn.GRU):
    """A GRU for all seats."""

    def forward(self, x, h):  # (time, matches, seats, inputs), (matches, seats, hidden)
        rows, state = x.flatten(1, 2), h.flatten(0, 1)
        if len(x) == 1:
            y = torch.gru_cell(rows[0], state, *self._flat_weights)  # at a single step cuDNN is slow
        elif x.is_cuda and torch.is_grad_enabled():
            y = Unroll.apply(F.linear(rows, self.weight_ih_l0, self.bias_ih_l0), state, *self._flat_weights[1::2])
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
    return torch.addcmul(mean, torch.randn_like(mean), torch.exp(0.5 * log_variance))


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


def seats_from(env):
    """(agents, agents): for every seat its own, then the others' in the order in which its observation has them."""
    seat, own = torch.arange(env.n_agents), torch.arange(env.n_agents).unsqueeze(1)
    if env.ego_first:
        return (own + seat) % env.n_agents
    return torch.cat((own, seat[:-1] + (seat[:-1] >= own)), 1)


class Inference(nn.Module):
    """The subgoal the past speaks for: a GRU over what was seen and done, an encoder, and a decoder to train it by."""

    def __init__(self, env, args, memory=96):
        super().__init__()
        self.memory, self.latent = memory, args.latent_dim
        self.certain, self.of_features = args.inference == "mlp", args.reconstruct == "features"
        self.past = SharedGRU(env.obs_dim + env.n_agents * env.n_actions, memory)
        self.now = nn.Linear(env.obs_dim, 32)
        self.encoder, self.code = nn.Linear(32 + memory, 64), Gaussian(64, self.latent)
        self.decoder = nn.Linear(self.latent + memory, 128)
        self.out = nn.Linear(128, 32 if self.of_features else env.obs_dim)
        self.register_buffer("order", seats_from(env), persistent=False)
        self.register_buffer("action", torch.arange(env.n_actions), persistent=False)

    def start(self, matches, seats):
        return torch.zeros(matches, seats, self.memory, device=self.order.device)

    def forward(self, obs, last_obs, last_action, seat, h):
        """(time, matches, own seats, ...), last_action (time, matches, agents) -> subgoal, h, (mean, log variance)

        The past is what was seen and what everybody did one step earlier: zeros and -1 at the start.
        """
        order = self.order[seat].expand(*obs.shape[:-1], -1)  # (time, matches, own seats, agents)
        done = last_action.unsqueeze(-2).expand_as(order).gather(-1, order)
        done = (done.unsqueeze(-1) == self.action).to(obs.dtype).flatten(-2)
        h = self.past(torch.cat((last_obs, done), -1), h)
        x = F.relu(self.now(obs))
        code = self.code(F.relu(self.encoder(torch.cat((x, h), -1))))
        return code[0] if self.certain else sample(*code), h, code

    def errors(self, obs, subgoal, h, code, goal):
        """What it learns by: (the reconstruction's error, the divergence from the goal, dimension by dimension)"""
        if self.certain:
            return (code[0] - goal[0]).square().mean(-1), torch.zeros_like(code[0])
        rebuilt = self.out(F.relu(self.decoder(torch.cat((subgoal, h), -1))))
        wanted = F.relu(self.now(obs)).detach() if self.of_features else obs
        return (rebuilt - wanted).square().mean(-1), divergence(*code, *goal)


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
                gc.disable()  # memory that is freed during a capture ends it
                with torch.cuda.graph(self.graph):
                    self.function()
                gc.enable()
            self.graph.replay()


class Rollout:
    """Plays whole episodes of all matches in lock step, every seat by the others; `story` keeps what is seen."""

    def __init__(self, env, kept, team):
        self.env, self.team, device = env, team, env.device
        rows = -(-env.episode_limit // CHUNK) * CHUNK + 1
        fields = self.mine(action=env.actions, obs=env.obs, **env.info)
        self.story = {name: fields[name].new_zeros((rows, *fields[name].shape)) for name in kept}
        self.part = {name: torch.zeros_like(values[:CHUNK]) for name, values in self.story.items()}
        self.story["seat"] = self.team.own.unsqueeze(0)  # the same at all times of a match
        self.last_action, self.lengths = torch.zeros_like(env.actions), torch.zeros_like(env.actions[:, 0])
        self.running = torch.zeros_like(env.terminated)
        self.chunk = Graphed(self.steps, device) if env.simulated else self.steps
        env.reset()

    def mine(self, **values):
        """The learner's seats of what agents have each, and everybody's under other names."""
        agents = ("action", "reward", "obs", "avail", "alive")
        everybody = {f"all_{name}": values[name] for name in agents if name in values}
        return everybody | {name: self.team.mine(value) if name in agents else value for name, value in values.items()}

    def write(self, where, row, values):
        for name in where.keys() & values.keys():
            where[name][row] = values[name]

    @torch.no_grad()
    def steps(self):
        for row in range(CHUNK):
            action = self.team.complete(torch.zeros_like(self.team.own), self.last_action)
            obs, _, terminated, truncated, info = self.env.step(action)
            self.write(self.part, row, self.mine(action=action, obs=obs, **info))
            self.lengths += self.running
            self.running &= ~(terminated | truncated)
            self.last_action.copy_(action)

    def play(self):
        """One episode of every match: (lengths, valid), there until the next call."""
        self.team.draw()
        obs, info = self.env.reset()
        self.lengths.zero_()
        self.last_action.fill_(-1)
        self.running.fill_(True)
        self.write(self.story, 0, self.mine(obs=obs, **info))
        for t in range(0, self.env.episode_limit, CHUNK):
            self.chunk()
            for name, values in self.part.items():
                first = t + (name not in ("action", "all_action"))  # the rest is seen after the step
                self.story[name][first : first + CHUNK] = values
            if not self.running.any():
                break
        return self.lengths, ~info["invalid"]


def masked_mean(mask, values):
    """The mean of the values that the mask selects."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class Model:
    """The VAE and the inference model."""

    def __init__(self, args, env):
        self.model = make_model(args, env)

    def infer(self, obs, everybody, seat):
        """What the inference model says at every step of episodes: (subgoal, memory, (mean, log variance))"""
        last_obs = torch.cat((torch.zeros_like(obs[:1]), obs[:-1]))
        last_action = torch.cat((torch.full_like(everybody[:1], -1), everybody))
        inference = self.model["inference"]
        return inference(obs, last_obs, last_action, seat, inference.start(*seat.shape))


def states_of(args, batch, obs):
    """What subgoals are codes of, (rows, matches, own seats, features)."""
    return obs if args.subgoal_input == "obs" else batch["state"].unsqueeze(2).expand(*obs.shape[:3], -1)


# ---- pre-training ----
def collect(args, rollout):
    """Rounds of the others' play; `there`: where the learner's seat is there to see."""
    stories, steps = [], 0
    bar = tqdm(total=args.pretrain_timesteps, unit_scale=True, disable=not sys.stderr.isatty(), desc="playing")
    while steps < args.pretrain_timesteps or len(stories) < 2:  # one is held out
        lengths, valid = rollout.play()
        steps += int(lengths.sum())
        bar.update(int(lengths.sum()))
        rows = torch.arange(int(lengths.max()) + 1, device=lengths.device).view(-1, 1, 1)
        stories.append({name: values[: len(rows), valid].clone() for name, values in rollout.story.items()})
        stories[-1]["there"] = stories[-1]["alive"] & (rows <= lengths[valid].unsqueeze(-1))
    bar.close()
    return stories


def vae_loss(args, vae, states):
    """(the loss, the mean squared error, the divergence from N(0, I))"""
    mean, log_variance = vae.encode(states)
    recon = (vae.decode(sample(mean, log_variance)) - states).square().mean()
    kl = divergence(mean, log_variance, torch.zeros_like(mean), torch.zeros_like(mean)).sum(-1).mean()
    return recon + args.kl_weight * kl, recon, kl


def train_vae(args, vae, states, held_out, writer=None):
    """Until the error held out no longer falls; after that the VAE is frozen."""
    optimizer = torch.optim.Adam(vae.requires_grad_(True).parameters(), args.model_learning_rate)
    best, patience = float("inf"), 0
    for update in tqdm(range(1, args.pretrain_updates + 1), disable=not sys.stderr.isatty(), desc="VAE"):
        loss, *_ = vae_loss(args, vae, states[torch.randint(len(states), (1024,), device=states.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 0:
            with torch.no_grad():
                error, recon, kl = (number.item() for number in vae_loss(args, vae, held_out))
            if writer:
                writer.add_scalar("pretrain/recon", recon, update)
                writer.add_scalar("pretrain/kl", kl, update)
            patience = 0 if error < 0.99 * best else patience + 1
            best = min(best, error)
            if patience == 3:
                break
    vae.requires_grad_(False)


def inference_loss(args, learner, story, chosen):
    """Of the inference model, whose goal is the next state, over the matches chosen."""
    story = {name: values[:, chosen] for name, values in story.items()}
    obs = torch.where(story["there"].unsqueeze(-1), story["obs"], 0.0)
    subgoal, memory, code = learner.infer(obs, story["all_action"][:-1], story["seat"][0])
    goal = learner.model["vae"].encode(states_of(args, story, obs)[1:])
    said = subgoal[:-1], memory[:-1], [values[:-1] for values in code]
    recon, kl = learner.model["inference"].errors(obs[:-1], *said, goal)
    return masked_mean(story["there"][1:], recon + args.kl_weight * kl.sum(-1))


def warm_up(args, learner, stories):
    optimizer = torch.optim.Adam(learner.model["inference"].parameters(), args.model_learning_rate)
    for update in tqdm(range(args.pretrain_updates // 5), disable=not sys.stderr.isatty(), desc="CVAE"):
        story = stories[update % len(stories)]
        chosen = torch.randint(story["obs"].shape[1], (args.batch_size,), device=story["obs"].device)
        optimizer.zero_grad()
        inference_loss(args, learner, story, chosen).backward()
        optimizer.step()


def pretrain(args, learner, rollout, writer=None):
    """Trains the VAE on states met while the others play every seat, then the inference model to expect the next state.

    Returns the errors held out: {"recon": ..., "kl": ..., "inference": ...}.
    """
    stories, vae = collect(args, rollout), learner.model["vae"]
    held_out = stories.pop()
    states = torch.cat([states_of(args, story, story["obs"])[story["there"]] for story in stories])
    test_states = states_of(args, held_out, held_out["obs"])[held_out["there"]][:8192]
    train_vae(args, vae, states, test_states, writer)
    if args.warm_up:
        warm_up(args, learner, stories)
    with torch.no_grad():
        _, recon, kl = vae_loss(args, vae, test_states)
        matches = torch.arange(min(held_out["obs"].shape[1], 64), device=states.device)
        expected = inference_loss(args, learner, held_out, matches)
    return {"recon": recon.item(), "kl": kl.item(), "inference": expected.item(), "states": len(states)}


def fits(args, env):
    """What the model's networks depend on."""
    choices = {name: getattr(args, name) for name in ("latent_dim", "subgoal_input", "reconstruct")}
    return {"map": env.name.removeprefix("sc2/"), **sizes_of(env), **choices}  # the real game's or not


def make_model(args, env):
    vae = StateVAE(env.obs_dim if args.subgoal_input == "obs" else env.state_dim, args.latent_dim)
    return {"vae": vae.requires_grad_(False).to(env.device), "inference": Inference(env, args).to(env.device)}


@torch.no_grad()
def picture(args, env, learner, team):
    """A match in the middle, with the places that the VAE gives back of what the learner's seat sees."""
    (obs, _), action = env.reset(), torch.full_like(env.actions, -1)
    for _ in range(min(10, env.episode_limit // 2)):
        action = team.complete(torch.zeros_like(team.own), action)
        obs, *_ = env.step(action)
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
    if (team.who < 0).any():
        raise SystemExit(f"--team {args.team} has no others to watch; omg_iql.py does with it what it needs by itself")
    learner = Model(args, env)
    kept = ["obs", "alive", "all_action"] + ["state"] * (args.subgoal_input == "state")
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
    errors = pretrain(args, learner, Rollout(env, kept, team), writer)

    model = {name: network.state_dict() for name, network in learner.model.items()}
    about = {"algorithm": Path(__file__).stem, "env_id": args.env_id, "fits": fits(args, env), "args": asdict(args)}
    part = run / "vae.part"
    torch.save({**about, "model": model, "errors": errors}, part)
    os.replace(part, run / "vae.pt")
    results = {"command": " ".join(sys.argv), "seconds": time.time() - started, **errors, "args": asdict(args)}
    results["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    (run / "results.json").write_text(json.dumps(results, indent=1))
    if args.subgoal_input == "obs" and env.simulated and hasattr(env, "places"):
        one = make_env(args, 1, device, args.seed + 1)
        image = picture(args, one, learner, make_team(args, one, args.seed + 1, understudy=True))
        writer.add_image("pretrain/rebuilt", image, dataformats="HWC")
    writer.close()
    line = "held-out error {recon:.4f}, divergence {kl:.2f}, inference {inference:.4f}, {states:,} states"
    print(line.format(**errors))
    use = f"python omg_iql.py --env-id {args.env_id} --vae {run / 'vae.pt'}"
    print(f"{time.time() - started:.1f} s; use it with: {use}")
