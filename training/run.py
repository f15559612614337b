"""A training run and its folder: progress, signals, checkpoints, resuming, results. Nothing here learns.

    args = parse_args(Args, __file__)
    with Run(args, __file__, STARTED, env, learner, state={"buffer": buffer, ...}) as run:
        while run.in_progress():
            ...
            run.count(steps, episodes)

A learner has `networks()` (name -> module), `optimizer`, `updates` and `metrics`. checkpoint.pt has what it takes to
act and to continue; resume-<steps>.pt what else it takes to continue exactly: random states, and what is in `state`,
objects with state_dict and load_state_dict. A learner may have `exports()`: name -> what a checkpoint has there that
differs. With every save each of them is written as a run folder of its own, which cannot be continued.
"""

import contextlib
import functools
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import envs
from envs.batch import GameFailed
from training import checkpoints, files
from training.episodes import EpisodeRunner, ScriptedPlayer, Stopped, load_runner, rng_state, set_rng_state
from training.exits import Exit, UsageError, not_ignored
from training.log import RETRY, Log, Progress, monotonic

SAVING = 0.1  # the share of a run's time that checkpoints may take


def seed_for(seed, purpose):
    """A seed for one purpose. Other seeds and other purposes have unrelated random numbers."""
    words = np.random.SeedSequence([seed, *purpose.encode()]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1


def set_up_torch(args):
    """Seeds torch and returns the device."""
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import torch.compile
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel a tensor: a fifth of an update
    if args.cuda:
        torch.set_float32_matmul_precision("high")  # TF32: a learner's noise is larger, and updates are a third faster
    if platform.machine() == "aarch64":
        torch.backends.mkldnn.enabled = False  # oneDNN is slow there at matrices as small as these
    _do_not_import_torch_compile()
    return torch.device("cuda" if args.cuda else "cpu")


@functools.cache  # once in a process: `step` is wrapped
def _do_not_import_torch_compile():
    """torch.optim imports torch.compile only to say what it should not compile, which takes seconds at every start.

    Here its methods are marked already, and steps run as they do without compilation. A script that has imported
    torch.compile by itself is left alone.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        original = getattr(method, "__wrapped__", None)
        if original is not None:
            setattr(original, "__dynamo_disable", original)
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop):
        step = getattr(optimizer.step, "__wrapped__", None)
        if step is not None:
            optimizer.step = torch.no_grad()(step)


def wilson_interval(successes, trials):
    """The 95% interval of a proportion."""
    z = 1.959964
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    low, high = ((centre + side * spread) / (1 + z * z / trials) for side in (-1, 1))
    return [max(low, 0.0), min(high, 1.0)]  # beyond them by rounding only


def summary_of(returns, lengths, won):
    """The results of EpisodeRunner.evaluate in numbers."""
    return {
        "win_rate": won.float().mean().item(),
        "win_rate_interval": wilson_interval(int(won.sum()), len(won)),
        "episodic_return": returns.mean().item(),
        "returns_by_agent": returns.mean(0).tolist(),
        "episodic_length": lengths.float().mean().item(),
        "episodes": len(won),
    }


def versions():
    return {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}


# ---- networks of earlier runs ----
def initialise_from(run, learner):
    """--init: loads the networks that both runs have. One of other sizes is an error, or stays new if the learner lists
    it as `team_networks`.

    Where the run has no `target_<name>` this one starts from <name>, as in a new run.
    """
    try:
        saved = checkpoints.read_run(run)
        checkpoints.check_env("it", saved, learner.env)
        networks = saved["networks"]
    except ValueError as error:
        raise UsageError(f"--init {run}: {error}") from None
    theirs, mine = (_agents_output(found) for found in (networks, learner.networks()))
    if theirs != mine:
        misfit = f"the agents of a run of {saved['algorithm']}.py have {theirs} as outputs, and here they have {mine}"
        raise UsageError(f"--init {run}: {misfit}")
    for name, network in learner.networks().items():
        weights = networks.get(name, networks.get(name.removeprefix("target_")))
        fits = weights is not None and _shapes(weights) == _shapes(network.state_dict())
        if fits:
            network.load_state_dict(weights)
        elif name == "agents" or (weights is not None and name not in getattr(learner, "team_networks", ())):
            misfit = f"the {name} of a run of {saved['algorithm']}.py have other sizes or options"
            raise UsageError(f"--init {run}: {misfit}")


def _agents_output(networks):
    """What networks that may have the same sizes are for: beside a critic the agents are policies, else values."""
    return "the logits of a policy" if "critic" in networks else "action values"


def _shapes(weights):
    return {name: tensor.shape for name, tensor in weights.items()}


# ---- a run ----
def folder_of(args, started):
    return Path(args.run_root) / f"{files.as_name(args.env_id)}__{args.exp_name}__{args.seed}__{int(started)}"


def make_folder(args, started):
    """The new folder of a run, which no other run has."""
    try:
        return files.make_folder(folder_of(args, started))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"--run-root {args.run_root}: no folder can be made there ({cause})") from None


def writable_folder(path):
    """Makes the folder where there is none, and returns its path; ends the program where nothing can be written."""
    try:
        return files.writable_folder(path)
    except ValueError as error:
        raise UsageError(error) from None


class Run:
    def __init__(self, args, script, started, env, learner, state, rows_before=0):
        """`rows_before`: of the log in Weights and Biases, for what is logged before the first step"""
        self.args = args
        self.env = env
        self.learner = learner
        self.state = state
        self.algorithm = Path(script).stem
        if args.init and not args.resume:
            initialise_from(args.init, learner)
        self.folder = Path(args.resume) if args.resume else make_folder(args, started)
        self.lock = files.FolderLock(self.folder)
        try:
            self.lock.acquire()
        except ValueError as error:
            raise UsageError(error) from None
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written to ({error.strerror})") from None
        device = env.device.type.upper()
        print(f"{self.folder}: {args.env_id}, {env.n_agents} agents, {args.num_envs} matches at a time on the {device}")
        self.resume_file = None
        self.progress = {"steps": 0, "episodes": 0, "seconds": 0.0, "evals": [], "complete": False}
        self.progress["next_eval"] = args.eval_interval
        if args.resume:
            self.restore()
        self.launched = monotonic(started)
        self.started = Progress.started = self.launched - self.progress["seconds"]
        self.stop_requests = []
        self.bar = None
        self.writer = Log(args, self.folder, self.steps + 1 if args.resume else None, rows_before)
        for part in state.values():
            if hasattr(part, "attend"):
                part.attend(self.should_stop, self.show_progress)

    def __enter__(self):
        self.signals = not_ignored()
        for number in self.signals:
            signal.signal(number, lambda number, frame: self.stop_requests.append(number))
        self.save_at = time.monotonic() + self.args.checkpoint_interval
        self.logged_at = time.monotonic()
        self.logged_steps = self.steps
        self.first_step = self.steps
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is Stopped:
                self.stop()
            if kind is GameFailed:
                self.save()
        except FloatingPointError as not_saved:
            kind, error = FloatingPointError, not_saved
        finally:
            default = signal.SIG_IGN if self.progress["complete"] else signal.SIG_DFL
            for number in self.signals:  # once a run is complete, or stopped and saved, further signals change nothing
                action = signal.default_int_handler if number == signal.SIGINT else default
                signal.signal(number, signal.SIG_IGN if self.stop_requests else action)
            self._set_bar(None)
            self.writer.close()
            self.lock.release()
        if kind in (FloatingPointError, GameFailed):
            raise Exit(f"stopped at step {self.steps:,}: {error}; {self._last_checkpoint()}", 1) from None

    @property
    def steps(self):
        return self.progress["steps"]

    # ---- stopping ----
    def should_stop(self):
        """Whether a signal asked the run to stop."""
        return bool(self.stop_requests)

    def stop_if_asked(self, progressed=True):
        """Saves the run and ends the program if it was asked to stop, or if its time is up and it has `progressed`."""
        limit = self.args.time_limit
        time_is_up = limit is not None and time.monotonic() - self.launched >= limit
        if self.stop_requests or (time_is_up and progressed):
            self.stop()

    def stop(self):
        """Saves the run and ends the program."""
        self._set_bar(None)
        number = next(iter(self.stop_requests), signal.SIGTERM)  # the time limit counts as SIGTERM
        if not self.save():
            raise Exit(f"stopped at step {self.steps:,} and not saved; {self._last_checkpoint()}", 1)
        also = f" --env-id {self.args.env_id}" if envs.names_code(self.args.env_id) else ""
        raise Exit(f"stopped at step {self.steps:,}; continue with --resume {self.folder}{also}", 128 + number)

    def save_or_stop(self):
        """For what comes before the first step."""
        self.stop_if_asked()
        if self.save_due():
            self.save()

    def _last_checkpoint(self):
        path = self.folder / "checkpoint.pt"
        return f"the last good checkpoint is {path}" if path.exists() else "no checkpoint was saved before"

    def in_progress(self):
        """Whether there are steps left. A run that was asked to stop is saved, and ends the program."""
        unfinished = self.steps < self.args.total_timesteps
        if unfinished:
            self.stop_if_asked(progressed=self.steps > self.first_step)
            if self.bar is None:
                self._set_bar("", self.args.total_timesteps, "steps", self.steps)
                self.round_began = self.logged_at = time.monotonic()
                self.last_round = 0, 1.0  # steps, seconds
        else:
            self._begin_final_evaluation()
            self._set_bar("final evaluation: ", self.args.final_eval_episodes, "matches")
        return unfinished

    def _begin_final_evaluation(self):
        """What it finds depends on the policy and the seed alone: a run that was killed in it finds it again."""
        if runner := self.state.get("eval_runner"):
            seed = seed_for(self.args.seed, "final evaluation")
            torch.manual_seed(seed)
            runner.begin_anew(seed)
            self.before_evaluation = runner.state_dict()

    def _set_bar(self, *arguments):
        """Ends the progress bar, and begins another one."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None if arguments == (None,) else Progress(*arguments)
        self.rounds_before = getattr(self.state.get("eval_runner"), "rounds", 0)

    def show_progress(self):
        """Called within rounds. A bar moves on as the last round did; a line has the steps of whole rounds."""
        if self.bar is None:
            return
        if self.bar.unit == "steps":
            steps, seconds = self.last_round if self.bar.in_terminal else (0, 1.0)
            self.bar.show(self.steps + steps * min((time.monotonic() - self.round_began) / seconds, 1))
        elif self.bar.unit == "matches" and (eval_runner := self.state.get("eval_runner")):
            complete = eval_runner.rounds - 1 - self.rounds_before  # a round counts from its beginning
            self.bar.show(max(complete, 0) * eval_runner.env.num_envs)
        else:
            self.bar.show(self.bar.done)

    def count(self, steps, episodes):
        before = self.steps
        self.progress["steps"] += steps
        self.progress["episodes"] += episodes
        self.progress["seconds"] = time.monotonic() - self.started
        self.last_round = steps, max(time.monotonic() - self.round_began, 1e-3)
        self.round_began = time.monotonic()
        for share in getattr(self.args, "keep_checkpoints", ()):
            if (before or -1) < share * self.args.total_timesteps <= self.steps:
                self.save_copy(self.folder / f"at-{share:g}")

    # ---- logs ----
    def log(self, values):
        """Logs a dictionary: numbers as scalars, tensors with several values as histograms."""
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self.writer.add_histogram(key, value, self.steps)
            else:
                self.writer.add_scalar(key, value, self.steps)

    def log_due(self):
        return time.monotonic() - self.logged_at >= self.args.log_interval

    def log_episodes(self, episodes, epsilon=None):
        """Logs a round of training episodes, and shows how far the run is."""
        speed = (self.steps - self.logged_steps) / (time.monotonic() - self.logged_at)
        valid = episodes.valid
        episodic_return = episodes.returns[valid].mean().item()
        win_rate = episodes.won[valid].float().mean().item()
        charts = {
            "charts/episodic_return": episodic_return,
            "charts/episodic_length": episodes.lengths[valid].float().mean().item(),
            "charts/win_rate": win_rate,
            "charts/SPS": speed,
        }
        if epsilon is not None:
            charts["charts/epsilon"] = epsilon
        if hasattr(self.env, "restarts"):
            charts["charts/restarts"] = self.env.restarts
        if not self.env.team_reward:
            by_seat = episodes.returns[valid].mean(0).tolist()
            charts |= {f"charts/episodic_return_{seat}": value for seat, value in enumerate(by_seat)}
        self.log(charts)
        line = f"return {episodic_return:.2f}, {speed:,.0f} steps/s"
        if self.env.team_reward:
            line = f"return {episodic_return:.2f}, won {win_rate:.0%}, {speed:,.0f} steps/s"
        self.bar.show(self.steps, line, now=True)
        self.logged_at = time.monotonic()
        self.logged_steps = self.steps

    def evaluation_due(self):
        due = self.steps >= self.progress["next_eval"]
        if due:
            self.progress["next_eval"] = (self.steps // self.args.eval_interval + 1) * self.args.eval_interval
        return due

    def log_evaluation(self, returns, lengths, won, **groups):
        """Logs the results of EpisodeRunner.evaluate, and further metrics, a dictionary for each group."""
        groups |= self._encounters()
        result = {"win_rate": won.float().mean().item(), "episodic_return": returns.mean().item(), **self._by_side()}
        shown = {name: result[name] for name in dict.fromkeys(("win_rate", *self._measures()))}
        for group, metrics in {"eval": shown, **groups}.items():
            self.log({f"{group}/{name}": value for name, value in metrics.items()})
        self.progress["evals"].append({"steps": self.steps, "seconds": time.monotonic() - self.started, **result})

    def _by_side(self):
        """The mean return of each side in the last evaluation, if learners play against each other."""
        found = getattr(self.state.get("eval_runner"), "side_returns", [])
        return {f"episodic_return_side_{side}": mean for side, mean in enumerate(found)}

    def _measures(self):
        """The names of what a run is judged by. With individual rewards `won` is left out, since it may be another
        agent's success; where two sides learn against each other, so is the mean return of both.
        """
        return ["win_rate"] * bool(self.env.team_reward) + [*(self._by_side() or ["episodic_return"])]

    def _encounters(self):
        """The mean returns by the number of a match with the same partners, if it is not always 1."""
        found = getattr(self.state.get("eval_runner"), "match_returns", {})
        return {"encounter": found} if found else {}

    def finish(self, returns, lengths, won, **groups):
        """Writes the last checkpoint and results.json, and prints a summary; parameters as in log_evaluation."""
        groups |= self._encounters()
        self.progress |= {"seconds": time.monotonic() - self.started, "complete": True}
        saved = self.save()
        final, measures, sides = summary_of(returns, lengths, won) | self._by_side(), self._measures(), self._by_side()
        script = self._best_script()
        self._set_bar(None)
        best = {
            key: max([final[key], *(evaluation[key] for evaluation in self.progress["evals"])])
            if key in measures
            else None
            for key in ("win_rate", "episodic_return")
        }
        results = {
            "env_id": self.args.env_id,
            "algorithm": self.algorithm,
            "seed": self.args.seed,
            "command": " ".join(sys.argv),
            "final": final,
            "best": best,
            **({"best_script": script} if script else {}),
            **self.progress,
            "updates": self.learner.updates,
            "versions": versions(),
            **({"restarts": self.env.restarts} if hasattr(self.env, "restarts") else {}),
            **groups,
            "args": asdict(self.args),
        }
        saved = write_json(results, self.folder / "results.json") and saved
        self.log({f"eval/{key}": final[key] for key in dict.fromkeys(("win_rate", *measures))})
        figures = {"final": final, "best": best, **({"best_script": script} if script else {})}
        figures = {f"{group}/{key}": found[key] for group, found in figures.items() for key in measures if key in found}
        self.log(figures)
        self.writer.add_hparams(asdict(self.args), figures)
        low, high = final["win_rate_interval"]
        print(f"{self.progress['seconds']:.1f} s, {self.steps:,} steps, {self.learner.updates:,} updates")
        share = f" won {final['win_rate']:.1%} ({100 * low:.1f} to {100 * high:.1f})"
        matches = self.env.matches_per_episode
        played = f"episodes of {matches} matches" if matches > 1 else "matches"
        line = f"of {len(won)} greedy {played}{share}" if self.env.team_reward else f"{len(won)} greedy {played}"
        if sides:
            line += ", return {:.2f} of one side, {:.2f} of the other".format(*sides.values())
        else:
            line += f", return {final['episodic_return']:.2f}"
        if not self.learner.updates:
            print("Nothing was learned: the run was too short for a single update.")
        if script:
            seats = "its seat" if returns.shape[1] == 1 else "its seats"
            share = f"{script['win_rate']:.1%}, " if self.env.team_reward else ""
            line += f"; `{script['policy']}` in {seats}: {share}return {script['episodic_return']:.2f}"
        print(line)
        if self.args.capture_video:
            self.record_video()
        if not saved:
            raise Exit(f"the results could not be written to {self.folder}", 1)

    def _best_script(self):
        """What the best scripted policy has in the learner's seats, in the matches of the last evaluation.

        None where nobody else plays, where there is no script, and in the real game, whose matches do not repeat.
        """
        runner = self.state.get("eval_runner")
        if not (runner and getattr(runner.team, "used", ()) and runner.env.simulated and runner.env.policies):
            return None
        found, policies = [], runner.env.default_others or runner.env.policies
        self._set_bar("scripts in the learner's seat: ", len(policies), "policies")
        for policy in policies:
            scripted_runner = EpisodeRunner(runner.env, runner.team, ScriptedPlayer(runner.env, policy))
            scripted_runner.load_state_dict(self.before_evaluation)
            found.append({"policy": policy, **summary_of(*scripted_runner.evaluate(self.args.final_eval_episodes))})
            self.bar.show(len(found))
        won = runner.env.team_reward  # else it may be another's success
        return max(found, key=lambda summary: (won and summary["win_rate"], summary["episodic_return"]))

    def record_video(self):
        """Writes and logs match.gif: a match of the final policy, in the team of the run."""
        from training import play  # it draws, which other runs do not need

        script, args = checkpoints.script_of(self.folder)
        path = self.folder / "match.gif"
        play.record(load_runner(self.folder, script.make_env(args, 1, self.env.device, "video")), path)
        self.writer.add_gif("eval/match", path, self.steps)

    # ---- checkpoints ----
    def save_due(self):
        return time.monotonic() >= self.save_at

    def save(self):
        """Saves the run, completely or not at all; returns whether it did.

        Replacing checkpoint.pt, which names its resume file, is the commit: before it the old pair of files is valid,
        after it the new one.
        """
        began = time.monotonic()
        resume_file = None if self.progress["complete"] else self._resume_file()
        checkpoint = self._checkpoint(resume_file)
        written = True
        if resume_file is not None:
            resume = {"steps": self.steps, "rng": rng_state(self.args.cuda)}
            resume |= {name: part.state_dict() for name, part in self.state.items()}
            written = checkpoints.write(resume, self.folder / resume_file)
        written = written and checkpoints.write(checkpoint, self.folder / "checkpoint.pt")
        if written:
            self.resume_file = resume_file
        for path in (*self.folder.glob("resume*.pt"), *self.folder.glob(".*.part")):  # .part: of a process that died
            if path.name != self.resume_file:
                path.unlink(missing_ok=True)
        written = written and self._save_exports(self.folder)
        interval, now = self.args.checkpoint_interval, time.monotonic()
        if interval:  # a large replay buffer takes long to write
            interval = max(interval, (now - began) / SAVING)
        self.save_at = now + (interval if written else RETRY)
        return written

    def save_copy(self, folder):
        """Keeps the policy as it is now in a folder of its own, as a run that cannot be continued."""
        self._write_copy(folder, {})
        self._save_exports(folder)

    def _save_exports(self, folder):
        """Writes the runs that a learner exports to folders in `folder`; returns whether it did."""
        exports = getattr(self.learner, "exports", dict)()
        written = [self._write_copy(folder / name, content) for name, content in exports.items()]
        return all(written)

    def _write_copy(self, folder, content):
        with contextlib.suppress(OSError):  # that it cannot be written there is said below
            folder.mkdir(exist_ok=True)
        return checkpoints.write(self._checkpoint(None) | content, folder / "checkpoint.pt")

    def _checkpoint(self, resume_file):
        self.learner.metrics.check_finite()
        if not self.folder.is_dir():
            raise Exit(f"the run folder {self.folder} is gone: nothing can be saved", 1)
        checkpoint = {
            "algorithm": self.algorithm,
            "env_id": self.args.env_id,
            "sizes": checkpoints.env_sizes(self.env),
            "args": asdict(self.args),
            "networks": {name: network.state_dict() for name, network in self.learner.networks().items()},
            "optimizer": self.learner.optimizer.state_dict(),
            "updates": self.learner.updates,
            "progress": self.progress,
            "resume": resume_file,
        }
        for name in ("networks", "optimizer"):  # of an update that was finite, weights may not be, or what is beside it
            check_finite(checkpoint[name], name)
        return checkpoint

    def _resume_file(self):
        """A name that the last save did not use."""
        name = f"resume-{self.steps}.pt"
        return name if name != self.resume_file else f"resume-{self.steps}-2.pt"

    def restore(self):
        self.args.size_limit.remove()
        try:
            saved = checkpoints.load_networks(self.folder, self.env, self.learner.networks())
            self.progress = saved["progress"]
            self.learner.updates = saved["updates"]
            checkpoints.load_optimizer(self.learner.optimizer, saved["optimizer"])
            self.resume_file = saved.get("resume")
            if self.resume_file is not None:
                self._restore_exactly(self.folder / self.resume_file)
        except (ValueError, KeyError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            self.lock.release()
            raise UsageError(f"--resume {self.folder} does not fit or is damaged: {error}") from None

    def _restore_exactly(self, path):
        if not path.exists():
            print(f"{path} is missing: going on with new matches and an empty buffer.")
            return
        resume = checkpoints.with_new_names(checkpoints.read(path), checkpoints.FORMER_FIELDS)
        if resume.get("steps") != self.steps:
            raise ValueError(f"{path.name} is of another step")
        set_rng_state(resume["rng"])
        for name, part in self.state.items():
            part.load_state_dict(resume[name])


def check_finite(content, name):
    """Raises a FloatingPointError if a tensor in nested dictionaries has a number that is not finite."""
    if isinstance(content, dict):
        for key, value in content.items():
            check_finite(value, f"{name}.{key}")
    elif isinstance(content, torch.Tensor) and content.is_floating_point() and not content.isfinite().all():
        raise FloatingPointError(f"{name} was not finite")


def write_json(content, path):
    """Whether it was written."""
    try:
        files.write_text(path, json.dumps(content, indent=1))
        return True
    except OSError as error:
        files.warn(f"{files.reason(error)}: {path} was not written")
        return False
