"""Cross-play: how egos do among team-mates that they have not met.

An ego is a run of any script or a scripted policy. It plays with every other in teams of that one alone (homologue) and
in teams mixed of all of them (non-homologue), from every seat equally often. All matches of an ego are one batch.
With --adapt it then learns on among these others, and is tested again.

    python evaluate.py --ego "runs/8m__omg_iql__*" --others "runs/8m__qmix__*" --team 7other1ego --cuda
                                                               docs/evaluate.md has every option, file and column
"""

import copy
import csv
import functools
import gc
import glob
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import tyro


@dataclass
class Args:
    ego: tuple[str, ...]
    """who is tested: run folders of any script (patterns will do), scripted policies"""
    others: tuple[str, ...]
    """the team-mates: run folders of iql.py, vdn.py or qmix.py (patterns will do), scripted policies"""
    team: str | None = None
    """the seats, such as 6other2ego (default: one ego, all others other)"""
    groups: tuple[Literal["homologue", "non-homologue"], ...] | None = None
    """teams of one other, mixed teams, or both (default: both, where there are two others and two seats for them)"""
    episodes: int = 1000
    """matches of an ego with each other, rounded up to a multiple of the seats; mixed teams play as many in all"""
    num_envs: int | None = None
    """matches played at a time, at most (default: 8192 on the GPU, 512 on the CPU, 8 of the real game)"""
    env_id: str | None = None
    """the environment (default: that of the runs)"""
    n_agents: int | None = None
    """number of agents, where the environment leaves it open (default: that of the runs)"""
    seed: int = 0
    """seed of everything that is random; all egos get the same matches"""
    cuda: bool = False
    """whether to use the GPU; if there is none, it says so and uses the CPU"""
    adapt: int | None = None
    """environment steps for which every ego that is a run learns on among the others, to be tested again"""
    video: bool = False
    """whether to save a GIF of a match of the first ego with the first other"""
    out: Path | None = None
    """the folder to write to (default: evaluations/<time>)"""


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    tyro.cli(Args)  # answers and leaves, before the imports that take seconds

import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import envs  # noqa: E402
from envs import play, render  # noqa: E402
from envs.team import Networks, Team, read_runs, refuse_another_map  # noqa: E402

PLAIN = ("iql", "vdn", "qmix")  # scripts without a model of the others
CHUNK = 8  # steps between two looks at whether all matches are over
EXCERPT, EXCERPTS = 64, 4  # matches that a model is measured on at a time, and how often for a row
COLUMNS = (
    "ego", "algorithm", "adapted", "group", "other", "episodes", "wins", "win_rate", "win_rate_low", "win_rate_high",
    "return", "return_low", "return_high", "return_std", "length",
)  # fmt: skip


# ---- what is asked for ----
def find(names):
    """name -> checkpoint of a run, None for what may be a scripted policy"""
    everyone = {}
    for name in names:
        found = {path: Path(path) / "checkpoint.pt" for path in sorted(glob.glob(name))}
        found = {path: read_file(file) for path, file in found.items() if file.exists()} or {name: None}
        for path in found.keys() & everyone.keys():
            raise ValueError(f"{path} is named more than once")
        everyone |= found
    return everyone


def read_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def check(args, egos):
    """Refuses what makes no sense, with what would, and fills in what depends on the runs and the device.

    Returns a team of one match, which knows the others and the environment.
    """
    if not egos or not args.others:
        raise ValueError("--ego and --others name somebody")
    for name in ("episodes", "num_envs", "adapt"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is above 0, not {getattr(args, name)}")
    runs = [saved for saved in (egos if any(egos.values()) else find(args.others)).values() if saved]
    if not runs and not args.env_id:
        raise ValueError("there is no run among egos and others: --env-id says what scripted policies are to play")
    args.env_id = args.env_id or runs[0]["env_id"]
    args.n_agents = args.n_agents or (runs[0]["args"]["n_agents"] if runs else None)
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and not args.env_id.startswith("sc2/"):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False
    args.num_envs = args.num_envs or (8 if args.env_id.startswith("sc2/") else 8192 if args.cuda else 512)
    env = make_env(args, 1)
    env.close()  # only its sizes are needed
    args.team = args.team or f"{env.n_agents - 1}other1ego"
    team = Schedule(env, args)
    for name, saved in egos.items():
        if saved:
            refuse_another_map(name, saved, env)
        elif name not in env.policies:
            known = ", ".join(env.policies)
            raise ValueError(f"--ego {name}: no run with a checkpoint.pt is there, and scripted policies are {known}")
        if args.adapt and saved and not saved["args"].get("share_parameters", True):
            raise ValueError(f"--adapt: {name} has a network for each seat, and a learner whose seat changes has one")
    can_mix = len(team.pool) > 1 and team.seats > 1
    args.groups = args.groups or ("homologue", "non-homologue")[: 2 if can_mix else 1]
    if "non-homologue" in args.groups and not can_mix:
        raise ValueError(f"mixed teams need two others in two seats, not {len(team.pool)} in {team.seats}")
    args.episodes = -(-args.episodes // env.n_agents) * env.n_agents
    args.out = args.out or Path("evaluations") / time.strftime("%Y-%m-%d_%H-%M-%S")
    return team


def make_env(args, num_envs):
    device = "cuda" if args.cuda else "cpu"
    return envs.make(args.env_id, num_envs=num_envs, device=device, seed=args.seed, n_agents=args.n_agents, check=False)


# ---- who plays with whom ----
class Schedule(Team):
    """Deals matches by their number, round after round: every other equally often, and with it every seat of the ego's.

    `match` (num_envs,) are the numbers of the round's matches, and `other` the places in `pool` of whom they are with.
    """

    def __init__(self, env, args):
        self.group = "homologue"
        super().__init__(env, args.team, ("ego",), args.others, seed=args.seed)
        self.seats = sum(count for count, numbers in self.parts if numbers is self.pool)
        if not self.seats:
            raise ValueError(f"team {args.team!r} has no seat for the others: name one of them other")

    def begin(self, group):
        self.group, self.rounds = group, 0

    def draw(self):
        matches, others, rng = self.env.num_envs, len(self.pool), np.random.default_rng([self.seed, self.rounds])
        self.match = np.arange(matches) + self.rounds * matches
        self.other = self.match % others

        def one_for_all(count, policies):
            return (self.match % policies).repeat(count)

        def mixed(count, policies):
            """Of any `policies` matches in a row everyone plays equally many seats, and a team is of different ones."""
            block, place = np.divmod(np.arange(matches), policies)
            order, shift = rng.random((2, block[-1] + 1, policies)).argsort(-1)
            place = place[:, None] + shift[block][:, np.arange(count) % policies]
            return np.take_along_axis(order[block], place % policies, 1)

        if self.group == "homologue":
            self.deal(self.match // others, one_for_all)
        else:
            self.deal(self.match, mixed)


# ---- egos without a model of the others ----
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
    """Plays whole episodes of all matches in lock step, with an ego that is scripted or a plain network."""

    def __init__(self, env, team, ego):
        self.env, self.team, self.policy = env, team, ego if ego in env.policies else None
        runs = {} if self.policy else {0: read_runs([ego], env)[0]["weights"]}
        self.networks = Networks(env, runs, capacity=team.own.numel())
        self.last_action, self.returns = torch.full_like(env.actions, -1), torch.zeros_like(team.mine(env.reward))
        self.running, self.lengths = torch.zeros_like(env.terminated), torch.zeros_like(env.actions[:, 0])
        self.chunk = Graphed(self.steps, env.device) if env.simulated else self.steps

    @torch.no_grad()
    def act(self, *_):
        """What everybody does now."""
        own = self.env.scripted_actions(self.policy) if self.policy else self.networks.act(self.last_action, 0.0)
        return self.last_action.copy_(self.team.complete(self.team.mine(own), self.last_action))

    def steps(self):
        for _ in range(CHUNK):
            _, reward, terminated, truncated, _ = self.env.step(self.act())
            self.returns += self.team.mine(reward)
            self.lengths += self.running
            self.running &= ~(terminated | truncated)

    def begin(self):
        self.team.draw()
        self.networks.deal(-(self.team.who >= 0).long().cpu().numpy())
        self.last_action.fill_(-1)

    def play(self, epsilon=0.0):
        """One episode of every match: (returns (matches, ego's seats), lengths, won, valid), there until the next."""
        self.begin()
        _, info = self.env.reset()
        self.returns.zero_()
        self.lengths.zero_()
        self.running.fill_(True)
        for _ in range(0, self.env.episode_limit, CHUNK):
            self.chunk()
            if not self.running.any():
                break
        return self.returns, self.lengths, info["won"], ~info["invalid"]


# ---- playing and counting ----
def evaluate(args, others, ego, saved, adapted=0):
    """The rows of an ego: group by group, other by other and all together."""
    total = others * args.episodes  # matches of each group
    rounds = -(-total // args.num_envs)
    env = make_env(args, -(-total // rounds))
    team = Schedule(env, args)
    torch.manual_seed(args.seed)
    if is_plain(saved):
        rollout, analyse = Rollout(env, team, ego), None
    else:
        script = play.load_script(saved["algorithm"], ego)
        *model, rollout = script.load_rollout(ego, env, team)
        analyse = functools.partial(script.analyse, *model)
    if env.simulated:
        env.reset(seed=args.seed)  # whatever a rollout has played before, all egos get the same matches
    rows, about = [], {"ego": ego, "algorithm": saved["algorithm"] if saved else "scripted", "adapted": adapted}
    for group in args.groups:
        team.begin(group)
        names = [*(team.names[number] for number in team.pool), "all"] if group == "homologue" else ["mixed"]
        sums, metrics = np.zeros((len(names), 5)), [[] for _ in names]
        for _ in range(rounds):
            returns, lengths, won, valid = (values.cpu().numpy() for values in rollout.play(epsilon=0.0))
            returns, valid = returns.astype(float).mean(1), valid & (team.match < total)
            facts = np.stack((np.ones(len(won)), won, returns, returns**2, lengths), 1)  # (matches, 5)
            for place in range(len(names)):
                mine = np.flatnonzero(valid & (team.other == place) if place < len(names) - 1 else valid)
                sums[place] += facts[mine].sum(0)
                if analyse:
                    measure(analyse, rollout, mine, metrics[place])
        for name, *figures in zip(names, sums.tolist(), metrics):
            rows.append({**about, "group": group, "other": name, **summary(*figures)})
    env.close()
    return rows


def is_plain(saved):
    return saved is None or saved["algorithm"] in PLAIN


def measure(analyse, rollout, matches, found):
    """Adds the model's metrics, excerpt by excerpt, to those found before; a short one where a round has no other."""
    for first in range(0, len(matches), EXCERPT):
        chosen = matches[first : first + EXCERPT]
        if len(found) < EXCERPTS and (len(chosen) == EXCERPT or first == 0):
            found.append(analyse(excerpt(rollout, chosen), matches=EXCERPT))


def excerpt(rollout, chosen):
    """A rollout as if it had played some of its matches only."""
    part, team = copy.copy(rollout), copy.copy(rollout.team)
    chosen = torch.from_numpy(chosen).to(team.own.device)
    team.own, team.who = team.own[chosen], team.who[chosen]
    part.team, part.lengths = team, rollout.lengths[chosen]
    part.story = {name: values[:, chosen] for name, values in rollout.story.items()}
    return part


def summary(sums, metrics):
    """The figures of a row with their 95% intervals, from sums over its matches and the metrics of excerpts."""
    episodes, wins, returns, squares, steps = sums
    row = {"episodes": int(episodes), "wins": int(wins)}
    if episodes:
        mean, (low, high) = returns / episodes, interval(wins, episodes)
        variance = max(squares / episodes - mean**2, 0.0) * episodes / max(episodes - 1, 1)
        spread = 1.959964 * (variance / episodes) ** 0.5
        row |= {"win_rate": wins / episodes, "win_rate_low": low, "win_rate_high": high, "return": mean}
        row |= {"return_low": mean - spread, "return_high": mean + spread, "return_std": variance**0.5}
        row["length"] = steps / episodes
    for name in dict.fromkeys(key for one in metrics for key in one):
        values = [one[name] for one in metrics if name in one]
        row[name] = float(np.mean(values))
        if len(values) > 1:
            spread = student(len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5
            row |= {f"{name}_low": row[name] - spread, f"{name}_high": row[name] + spread}
    return row


def interval(successes, trials):
    """Wilson's 95% interval of a share."""
    z, share = 1.959964, successes / trials
    centre, spread = share + z * z / (2 * trials), z * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    return [(centre - spread) / (1 + z * z / trials), (centre + spread) / (1 + z * z / trials)]


def student(freedom):
    """What Student's t stays below, to either side, with 95%."""
    return (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)[freedom - 1] if freedom < 8 else 1.96 + 2.6 / freedom


# ---- learning on ----
def adapt(args, ego, saved):
    """Runs the ego's script from its networks and with its options, among the others; returns the new run's folder."""
    script, root = "iql" if is_plain(saved) else saved["algorithm"], args.out / "runs"
    options = {
        **saved["args"], "exp_name": saved["args"]["exp_name"] + "_adapted", "seed": args.seed, "cuda": args.cuda,
        "track": False, "capture_video": False, "run_root": root, "resume": None, "init": ego, "time_limit": None,
        "env_id": args.env_id, "team": args.team.replace("ego", "learner"), "pool": args.others, "seat": "rotate",
        "mix_teammates": "homologue" not in args.groups, "total_timesteps": args.adapt,
        "eval_interval": max(args.adapt // 20, 1), "start_e": 0.05, "end_e": 0.05, "vae": None,
        "train_frequency": None if args.env_id.startswith("sc2/") else 1000 if args.cuda else 100,
    }  # fmt: skip
    known = play.load_script(script, ego).Args.__dataclass_fields__
    command = [sys.executable, str(Path(__file__).parent / f"{script}.py")]
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            value, option = [], option if value else f"no-{option}"
        if name in known and value is not None:
            command += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    before = set(root.glob("*"))
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"--adapt: {script}.py failed for {ego}: {' '.join(command)}")
    (run,) = set(root.glob("*")) - before
    return str(run)


def write_adaptation(out, runs, metric):
    """adaptation.csv and adaptation.png: the evaluations of every ego while it learned on."""
    curves = {ego: json.loads((Path(run) / "results.json").read_text())["evals"] for ego, run in runs.items()}
    with open(out / "adaptation.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["ego", "steps", "seconds", "win_rate", "episodic_return"])
        writer.writeheader()
        writer.writerows({"ego": ego, **point} for ego, curve in curves.items() for point in curve)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for ego, label in labels(curves).items():
        axes.plot(*zip(*((e["steps"], e[metric]) for e in curves[ego])), label=label)
    axes.set(xlabel="steps of learning on", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out / "adaptation.png", dpi=120)


# ---- what is written ----
def labels(names):
    """Names of runs without their folders, where that leaves them different."""
    short = {name: Path(name).name for name in names}
    return short if len(set(short.values())) == len(short) else dict(zip(names, names))


def write_rows(out, about, rows):
    """results.json and results.csv"""
    extra = dict.fromkeys(key for row in rows for key in row if key not in COLUMNS)
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *extra])
        writer.writeheader()
        writer.writerows(rows)
    (out / "results.json").write_text(json.dumps({**about, "rows": rows}, indent=1, default=str))


def table(rows):
    """A line for every row; of many only those that sum up."""
    if len(rows) > 60:
        rows = [row for row in rows if row["other"] in ("all", "mixed")]
    names = labels(dict.fromkeys([row[key] for row in rows for key in ("ego", "other")]))
    lines = [("ego", "team", "episodes", "won", "95%", "return", "95%", "")]
    for row in rows:
        ego = names[row["ego"]] + (f" after {row['adapted']:,} steps" if row["adapted"] else "")
        team = f"{row['group']} {names[row['other']]}" if row["group"] == "homologue" else row["group"]
        if not row["episodes"]:
            lines.append((ego, team, "0", *[""] * 5))
            continue
        measured = (key for key in row if key not in COLUMNS and not key.endswith(("_low", "_high")))
        win, earned = ("{win_rate_low:.1%} to {win_rate_high:.1%}", "{return_low:.2f} to {return_high:.2f}")
        figures = (f"{row['win_rate']:.1%}", win.format(**row), f"{row['return']:.2f}", earned.format(**row))
        lines.append(
            (ego, team, f"{row['episodes']:,}", *figures, ", ".join(f"{key} {row[key]:.3f}" for key in measured))
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines)


def draw(out, rows, metric):
    """heatmap.png: egos by others."""
    egos = list(dict.fromkeys((row["ego"], row["adapted"]) for row in rows))
    others = list(dict.fromkeys(row["other"] for row in rows))
    values = np.full((len(egos), len(others)), np.nan)
    for row in rows:
        values[egos.index((row["ego"], row["adapted"])), others.index(row["other"])] = row.get(metric, np.nan)
    names, columns = labels(dict.fromkeys(ego for ego, _ in egos)), labels(others)
    figure = Figure(figsize=(4 + 0.5 * len(others), 3 + 0.4 * len(egos)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", **({"vmin": 0, "vmax": 1} if metric == "win_rate" else {}))
    middle = np.nanmean([*image.get_clim()])
    for (y, x), value in np.ndenumerate(values):
        text = f"{value:.0%}" if metric == "win_rate" else f"{value:.1f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color="black" if value > middle else "white")
    axes.set_xticks(range(len(others)), [columns[other] for other in others], rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(egos)), [names[ego] + " adapted" * (steps > 0) for ego, steps in egos], fontsize=7)
    figure.colorbar(image, label=metric.replace("_", " "))
    figure.savefig(out / "heatmap.png", dpi=120)


def film(args, ego, saved):
    """match.gif: the ego with the first other, and where it expects the others, if it has such a model."""
    args = replace(args, cuda=False)
    env = make_env(args, 1)
    team = Schedule(env, args)
    first = (team.names[team.pool[0]],)
    with tempfile.TemporaryDirectory() as folder:
        if is_plain(saved):
            rollout = Rollout(env, Schedule(env, replace(args, others=first)), ego)
            rollout.begin()
            act = rollout.act
        else:  # the same run, with another team
            settings = {**saved["args"], "team": args.team.replace("ego", "learner"), "pool": first, "seat": "rotate"}
            torch.save({**saved, "args": settings}, Path(folder) / "checkpoint.pt")
            act = play.trained_policy(Path(folder), env)
        scenes, _ = play.play(env, act, args.seed, watch=lambda scene: None)
    env.close()
    play.write_gif(args.out / "match.gif", [render.draw(scene, goals=scene.get("goals")) for scene in scenes], fps=8)


def main(args):
    started, egos = time.time(), find(args.ego)
    team = check(args, egos)
    args.out.mkdir(parents=True, exist_ok=True)
    rows, adapted = [], {}
    for ego, saved in egos.items():
        rows += evaluate(args, len(team.pool), ego, saved)
        print(f"{time.time() - started:7.1f} s  {ego}", flush=True)
        gc.collect()  # a rollout and its graph hold each other, and much memory
        if args.adapt and saved:
            adapted[ego] = adapt(args, ego, saved)
            after = read_file(Path(adapted[ego]) / "checkpoint.pt")
            rows += [{**row, "ego": ego} for row in evaluate(args, len(team.pool), adapted[ego], after, args.adapt)]
    metric = "win_rate" if team.env.team_reward else "return"
    about = {"command": " ".join(sys.argv), "seconds": time.time() - started, "args": asdict(args), "adapted": adapted}
    about["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    write_rows(args.out, about, rows)
    draw(args.out, rows, metric)
    if adapted:
        write_adaptation(args.out, adapted, "win_rate" if team.env.team_reward else "episodic_return")
    if args.video:
        film(args, *next(iter(egos.items())))
    print(table(rows))
    print(f"{time.time() - started:.1f} s; results.csv, results.json and heatmap.png are in {args.out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
