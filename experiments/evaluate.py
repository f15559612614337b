"""Cross-play: how egos do with partners that they have not met.

An ego is a run of any script or a scripted policy. It plays with teams of one partner policy (homologue) and with teams
that draw one for each seat (non-homologue), from every seat equally often. All matches of an ego are one batch. With
--adapt it then continues to learn with these partners, and is tested again.

    python -m experiments.evaluate --ego "runs/8m__omg_iql__*" --others "runs/8m__qmix__*" --team 7other1ego --cuda
                                                               docs/evaluate.md has the files, the columns and the order
"""

import csv
import gc
import io
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import tyro


@dataclass
class Args:
    ego: tuple[str, ...]  # the policies to test: run folders of any script (or patterns), scripted policies
    others: tuple[str, ...] = ()  # their partners: run folders of any script (or patterns), scripted policies
    bounds: Path | None = None  # a manifest of strangers.py: the partners, and bounds between which scores lie
    team: str | None = None  # the seats, such as 6other2ego (default: one ego, partners elsewhere)
    # partners that all have one policy, or one drawn for each seat (default: both, where there are seats for it)
    groups: tuple[Literal["homologue", "non-homologue"], ...] | None = None
    episodes: int = 1000  # matches of each ego with each partner, rounded up to a multiple of the seats
    matches_per_partner: int | None = None  # matches in a row with a partner (default: 1, with --bounds the stage's)
    num_envs: int | None = None  # matches at a time at most (default: 8192 on the GPU, 512 on the CPU, sc2/ 8)
    script: tuple[str, ...] = ()  # scripts of your own that runs need and that are not in the project's folder
    env_id: str | None = None  # the environment (default: that of the runs)
    n_agents: int | None = None  # number of agents, where the environment leaves it open (default: that of the runs)
    seed: int = 0  # the seed of all random numbers; all egos get the same matches
    cuda: bool = False  # whether to use the GPU; if there is none, it says so and uses the CPU
    adapt: int | None = None  # steps that egos (runs only) continue to learn with these partners, before a second test
    video: bool = False  # whether to save a GIF of a match of the first ego with the first partner
    out: Path | None = None  # the folder to write to (default: evaluations/<time>)


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    tyro.cli(Args, prog="python -m experiments.evaluate")  # prints the help and exits, before the slow imports

import numpy as np
import torch

import envs
from envs.batch import GameFailed
from experiments import results
from training import checkpoints, files, play
from training.args import check_ranges, fill_in, resolve_device, to_argv, use_new_names
from training.episodes import EpisodeRunner, ScriptedPlayer, load_runner
from training.exits import Exit, UsageError, exit_on_signals
from training.run import versions
from training.team import Team

ANALYSED, ANALYSES = 64, 4  # matches that a model is measured on at a time, and how often for a row
COLUMNS = (
    "ego", "algorithm", "adapted", "group", "other", "episodes", "wins", "win_rate", "win_rate_low", "win_rate_high",
    "return", "return_low", "return_high", "return_std", "length",
)  # fmt: skip


# ---- arguments ----
def find(names):
    """name -> checkpoint of a run, None for what may be a scripted policy"""
    everyone = {}
    for name in names:
        found = {path: checkpoints.read_run(path) for path in checkpoints.find_runs(name)} or {name: None}
        for path in found.keys() & everyone.keys():
            raise ValueError(f"{path} is named more than once")
        everyone |= found
    return everyone


def check_args(args, egos):
    """Rejects invalid arguments, and fills in what depends on the runs and the device.

    Returns the schedule of a single match, which knows the others and the environment.
    """
    if not egos or not args.others:
        raise ValueError("--ego and --others name somebody")
    fill_in(args, {"matches_per_partner": 1})
    check_ranges(args, positive="episodes matches_per_partner num_envs adapt", non_negative="seed")
    known = [saved for saved in (egos if any(egos.values()) else find(args.others)).values() if saved]
    if not known and not args.env_id:
        raise ValueError("there is no run among egos and others: --env-id says what scripted policies are to play")
    args.env_id = args.env_id or checkpoints.id_from_file("a run", known[0]["env_id"], "--env-id")
    args.n_agents = args.n_agents or (known[0]["args"].get("n_agents") if known else None)
    resolve_device(args)
    slow_game = not envs.is_simulated(args.env_id)
    fill_in(args, {"num_envs": 8 if slow_game else 8192 if args.cuda else 512})
    env = make_env(args, 1)
    env.close()  # only its sizes are needed
    fill_in(args, {"team": f"{env.n_agents - 1}other1ego"})
    schedule = Schedule(env, args)
    for name, saved in egos.items():
        if saved:
            checkpoints.check_env(name, saved, env)
            script = checkpoints.load_script(saved["algorithm"], f"--ego {name}:")
        elif name not in env.policies:
            scripted = ", ".join(env.policies)
            raise ValueError(f"--ego {name}: no run with a checkpoint.pt is there; scripted policies are {scripted}")
        if args.adapt and saved:
            check_names(name, saved)
            if not {"team", "pool"} <= saved["args"].keys():
                raise ValueError(f"--adapt: {saved['algorithm']}.py has no --team to learn among others")
            if not saved["args"].get("share_parameters", True):
                raise ValueError(f"--adapt: {name} has a network for each seat, a learner whose seat changes has one")
            known = script.known_policies(name) if hasattr(script, "known_policies") else 0
            if known and known != (others := len(schedule.pool)):
                raise ValueError(f"--adapt: {name} tells {known} policies apart, and there are {others} others")
    can_mix = len(schedule.pool) > 1 and schedule.seats > 1
    fill_in(args, {"groups": ("homologue", "non-homologue")[: 2 if can_mix else 1]})
    if not args.groups:
        raise ValueError("--groups is homologue, non-homologue or both")
    if "non-homologue" in args.groups and not can_mix:
        raise ValueError(f"mixed teams need two others in two seats, not {len(schedule.pool)} in {schedule.seats}")
    args.episodes = -(-args.episodes // env.n_agents) * env.n_agents
    fill_in(args, {"out": Path("evaluations") / time.strftime("%Y-%m-%d_%H-%M-%S")})
    return schedule


def make_env(args, num_envs, matches_per_episode=1):
    device = "cuda" if args.cuda else "cpu"
    return envs.make(args.env_id, num_envs, device, args.seed, args.n_agents, matches_per_episode, check=False)


# ---- who plays with whom ----
class Schedule(Team):
    """Seats matches by their number, round after round: every other equally often, and with it every seat of the ego's.

    `match` (num_envs,) are the numbers of the round's matches, and `other` the indices in `pool` of whom they are with.
    """

    def __init__(self, env, args):
        self.group = "homologue"
        matches = args.matches_per_partner // env.matches_per_episode
        super().__init__(env, args.team, ("ego",), args.others, seed=args.seed, matches_per_partner=matches)
        self.seats = sum(count for count, policies in self.groups if policies is self.pool)
        if not self.seats:
            raise ValueError(f"team {args.team!r} has no seat for the others: name one of them other")

    def begin(self, group):
        self.group = group
        self.rounds = 0

    def draw(self):
        matches = self.env.num_envs
        others = len(self.pool)
        rng = np.random.default_rng([self.seed, self.rounds])
        self.match = np.arange(matches) + self.rounds * matches
        self.other = self.match % others

        def one_for_all(count, policies):
            return (self.match % policies).repeat(count)

        def mixed(count, policies):
            """Of any `policies` consecutive matches each plays equally many seats, and a team has different ones."""
            block, place = np.divmod(np.arange(matches), policies)
            order, shift = rng.random((2, block[-1] + 1, policies)).argsort(-1)
            place = place[:, None] + shift[block][:, np.arange(count) % policies]
            return np.take_along_axis(order[block], place % policies, 1)

        if self.group == "homologue":
            self.assign(self.match // others, one_for_all)
        else:
            self.assign(self.match, mixed)


# ---- playing and counting ----
def make_runner(ego, saved, env, schedule):
    if saved:
        return load_runner(ego, env, schedule)
    return EpisodeRunner(env, schedule, ScriptedPlayer(env, ego))


def evaluate(args, ego, saved, others, adapted=0):
    """The rows of an ego: group by group, other by other and all together."""
    total = others * args.episodes  # matches of each group
    rounds = -(-total // args.num_envs)
    keeps_memory = bool(
        saved and saved["args"].get("persist_hidden")
    )  # its matches with the same partners are one episode then
    env = make_env(args, -(-total // rounds), args.matches_per_partner if keeps_memory else 1)
    schedule = Schedule(env, args)
    torch.manual_seed(args.seed)
    runner = make_runner(ego, saved, env, schedule)
    if env.simulated:
        env.reset(seed=args.seed)  # all egos get the same matches
    rows = []
    columns = {"ego": ego, "algorithm": saved["algorithm"] if saved else "scripted", "adapted": adapted}
    for group in args.groups:
        schedule.begin(group)
        names = ["mixed"]
        if group == "homologue":
            names = [*(schedule.policy_names[policy] for policy in schedule.pool), "all"]
        sums = np.zeros((len(names), 5 + args.matches_per_partner))
        metrics = [[] for _ in names]
        for _ in range(rounds * schedule.matches_per_partner):
            played = runner.play()
            found = (played.returns, played.lengths, played.won, played.valid)
            returns, lengths, won, valid = (values.cpu().numpy() for values in found)
            returns = returns.astype(float).mean(1) / env.matches_per_episode
            valid = valid & (schedule.match < total)
            values = np.stack((np.ones(len(won)), won, returns, returns**2, lengths), 1)  # (matches, 5)
            by_number = np.zeros((len(won), args.matches_per_partner))
            for number, earned in runner.returns_by_match().items():
                by_number[:, number - 1] = earned.cpu() * schedule.matches_per_partner
            values = np.concatenate((values, by_number), 1)
            for i in range(len(names)):
                is_total = i == len(names) - 1
                matches = np.flatnonzero(valid if is_total else valid & (schedule.other == i))
                sums[i] += values[matches].sum(0)
                if hasattr(runner.player, "analyse"):
                    analyse(runner, matches, metrics[i])
        new = [{**columns, "group": group, "other": name} for name in names]
        for row, *found in zip(new, sums.tolist(), metrics):
            row |= results.match_summary(*found)
        met = [row for row in new[:-1] if row["episodes"]]
        if len(met) > 1:  # matches with one other are alike: what varies most is whom one meets
            for name, least, most in (("win_rate", 0.0, 1.0), ("return", -np.inf, np.inf)):
                low, high = np.clip(results.mean_interval([[row[name] for row in met]]), least, most).tolist()
                new[-1][f"{name}_low"] = min(low, new[-1][f"{name}_low"])
                new[-1][f"{name}_high"] = max(high, new[-1][f"{name}_high"])
        rows += new
    env.close()
    return rows


def analyse(runner, matches, metrics):
    """Adds the model's metrics on some of the matches, at a time ANALYSED of them, or fewer where a round has fewer."""
    for first in range(0, len(matches), ANALYSED):
        chosen = matches[first : first + ANALYSED]
        if len(metrics) < ANALYSES and (len(chosen) == ANALYSED or first == 0):
            selection = runner.selection(torch.from_numpy(chosen).to(runner.env.device))
            metrics.append(runner.player.analyse(selection))


# ---- adaptation ----
def check_names(ego, saved):
    """Raises a ValueError if a run's arguments would lead its folder elsewhere, or be taken for other options."""
    name = saved["args"].get("exp_name")
    if not isinstance(name, str) or Path(name).name != name or "\\" in name or name == "..":
        raise ValueError(f"{ego}: exp_name is a name without a path, not {name!r}")
    for key, value in saved["args"].items():
        words = value if isinstance(value, (list, tuple)) else [value]
        if any(str(word).startswith("--") for word in words):
            raise ValueError(f"{ego}: {key} is not {value!r}")


def adapt(args, ego, saved):
    """Continues an ego with its own script and options among the others; returns the new run's folder."""
    root = args.out / "runs"
    script = checkpoints.load_script(saved["algorithm"], f"{ego}:")
    options = {
        **saved["args"], "exp_name": saved["args"]["exp_name"] + "_adapted", "seed": args.seed, "cuda": args.cuda,
        "track": False, "capture_video": False, "run_root": root, "resume": None, "init": ego, "time_limit": None,
        "env_id": args.env_id, "team": args.team.replace("ego", "learner"), "pool": args.others, "seat": "rotate",
        "mix_teammates": "homologue" not in args.groups, "total_timesteps": args.adapt,
        "eval_interval": max(args.adapt // 20, 1), "start_e": 0.05, "end_e": 0.05, "vae": None,
        "train_frequency": None if not envs.is_simulated(args.env_id) else 1000 if args.cuda else 100,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if name in script.Args.__dataclass_fields__}
    command = [sys.executable, script.__file__, *to_argv(options)]
    before = set(root.glob("*"))
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"--adapt: {script.__file__} failed for {ego}: {' '.join(command)}")
    made = set(root.glob("*")) - before
    if len(made) != 1:
        raise ValueError(f"--adapt: {script.__file__} made {len(made)} runs in {root} for {ego}, not one")
    return str(made.pop())


@results.plain_text
def write_adaptation(out, runs, metric):
    """adaptation.csv and adaptation.png: the evaluations of every ego during adaptation."""
    from matplotlib.figure import Figure  # slow to import

    curves = {ego: json.loads((Path(run) / "results.json").read_text())["evals"] for ego, run in runs.items()}
    points = [{"ego": ego, **point} for ego, curve in curves.items() for point in curve]
    write_csv(out / "adaptation.csv", ["ego", "steps", "seconds", "win_rate", "episodic_return"], points)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for ego, label in labels(curves).items():
        axes.plot(*zip(*((e["steps"], e[metric]) for e in curves[ego])), label=label)
    axes.set(xlabel="steps of adaptation", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    files.write(out / "adaptation.png", lambda file: figure.savefig(file, dpi=120))


# ---- output ----
def labels(names):
    """Short names of runs, without their folders, where these differ."""
    short = {name: Path(name).name for name in names}
    return short if len(set(short.values())) == len(short) else dict(zip(names, names))


def write_table(out, rows):
    """results.csv"""
    extra = dict.fromkeys(key for row in rows for key in row if key not in COLUMNS)
    write_csv(out / "results.csv", [*COLUMNS, *extra], rows)


def write_rows(out, about, rows):
    """results.json and results.csv"""
    write_table(out, rows)
    files.write_text(out / "results.json", json.dumps({**about, "rows": rows}, indent=1, default=str))


def write_csv(path, columns, rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())


def table(rows):
    """A line for every row; of more than 60 rows only the totals."""
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


@results.plain_text
def draw(out, rows, metric):
    """heatmap.png: egos by others."""
    from matplotlib.figure import Figure

    egos = list(dict.fromkeys((row["ego"], row["adapted"]) for row in rows))
    others = list(dict.fromkeys(row["other"] for row in rows))
    values = np.full((len(egos), len(others)), np.nan)
    for row in rows:
        values[egos.index((row["ego"], row["adapted"])), others.index(row["other"])] = row.get(metric, np.nan)
    names, columns = labels(dict.fromkeys(ego for ego, _ in egos)), labels(others)
    rows_named = [names[ego] + " adapted" * (steps > 0) for ego, steps in egos]
    columns_named = [columns[other] for other in others]
    width = 2.5 + 0.5 * len(others) + 0.06 * max(map(len, rows_named))  # inches, with room for the names
    height = 2 + 0.4 * len(egos) + 0.05 * max(map(len, columns_named))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", **({"vmin": 0, "vmax": 1} if metric == "win_rate" else {}))
    middle = np.nanmean([*image.get_clim()])
    for (y, x), value in np.ndenumerate(values):
        text = f"{value:.0%}" if metric == "win_rate" else f"{value:.1f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color="black" if value > middle else "white")
    axes.set_xticks(range(len(others)), columns_named, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(egos)), rows_named, fontsize=7)
    figure.colorbar(image, label=metric.replace("_", " "))
    files.write(out / "heatmap.png", lambda file: figure.savefig(file, dpi=120))


def record(args, ego, saved):
    """match.gif: the ego with the first other, and where it expects the others, if it predicts that."""
    args = replace(args, cuda=False)
    env = make_env(args, 1)
    schedule = Schedule(env, args)
    first = schedule.policy_names[schedule.pool[0]]
    schedule = Schedule(env, replace(args, others=(first,)))
    play.record(make_runner(ego, saved, env, schedule), args.out / "match.gif", args.seed)
    env.close()


def main(args):
    started = time.monotonic()
    bounds, stage = results.read_bounds(args.bounds) if args.bounds else ({}, {})
    args.others = args.others or tuple(bounds)
    if stage and not args.env_id:
        checkpoints.id_from_file(f"--bounds {args.bounds}", stage["env_id"], "--env-id")
    fill_in(args, stage)
    checkpoints.name_scripts(args.script)
    egos = find(args.ego)
    schedule = check_args(args, egos)
    if args.env_id != stage.get("env_id", args.env_id):
        raise ValueError(f"--bounds {args.bounds} are of {stage['env_id']}, not of {args.env_id}")
    files.writable_folder(args.out)
    rows, adapted = [], {}
    for ego, saved in egos.items():
        rows += evaluate(args, ego, saved, len(schedule.pool))
        print(f"{time.monotonic() - started:7.1f} s  {ego}", flush=True)
        write_table(args.out, rows)  # whatever comes after it
        gc.collect()  # a runner and its graph refer to each other, and hold much memory
        if args.adapt and saved:
            adapted[ego] = adapt(args, ego, saved)
            after = checkpoints.read_run(adapted[ego])
            new = evaluate(args, adapted[ego], after, len(schedule.pool), args.adapt)
            rows += [{**row, "ego": ego} for row in new]
    is_won = schedule.env.team_reward and results.is_won_together(args.env_id)
    results.normalise(rows, bounds)
    write_table(args.out, rows)
    print(table(rows))
    draw(args.out, rows, "win_rate" if is_won else "return")
    if adapted:
        write_adaptation(args.out, adapted, "win_rate" if is_won else "episodic_return")
    if args.video:
        record(args, *next(iter(egos.items())))
    command = " ".join(["python -m experiments.evaluate", *sys.argv[1:]])
    about = {"command": command, "seconds": time.monotonic() - started, "args": asdict(args)}
    about |= {"adapted": adapted, "versions": versions()}
    write_rows(args.out, about, rows)  # at the end, for it says that all is there
    print(f"{time.monotonic() - started:.1f} s; results.csv, results.json and heatmap.png are in {args.out}")


if __name__ == "__main__":
    sys.argv[1:] = use_new_names(sys.argv[1:])
    args = tyro.cli(Args, prog="python -m experiments.evaluate")
    exit_on_signals()
    try:
        main(args)
    except ValueError as error:
        raise UsageError(f"error: {error}") from None
    except GameFailed as error:
        raise Exit(f"error: {error}", 1) from None
