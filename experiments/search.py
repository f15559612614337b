"""A search over settings by Optuna: which one to try next, after those that were tried.

Optuna keeps no state of its own: for each question it is told all trials so far. The settings are in one file, their
results in the run folders, so that a search goes on like any sweep.
"""

import json
import math

import numpy as np

from experiments.results import SIDE, load_results, metric_of
from training import files

FAILURES = 3  # trials that may fail before one succeeds
DRAWS = 100  # how often Optuna is asked for a setting that is new


def parse_space(words):
    """["gamma=0.9..0.99", "td-lambda=0.5,0.7"] -> {option: Optuna's distribution}."""
    try:
        import optuna
    except ImportError:
        raise ValueError('--search needs Optuna: pip install -e ".[search]"') from None
    space = {}
    for word in words:
        name, _, values = word.removeprefix("--").partition("=")
        try:
            if ".." in values:
                space[name] = range_of(optuna.distributions, *values.split(".."))
            else:
                space[name] = choices_of(optuna.distributions, values.split(","))
        except (ValueError, TypeError):
            example = "learning-rate=1e-4..1e-2 or td-lambda=0.5,0.7,0.9"
            raise ValueError(f"--search takes options with a range or choices, such as {example}, not {word}") from None
    return space


def range_of(distributions, low, high):
    """From low to high: whole numbers if both are; logarithmic over more than a factor of 10."""
    try:
        low, high, kind = int(low), int(high), distributions.IntDistribution
    except ValueError:
        low, high, kind = float(low), float(high), distributions.FloatDistribution
    if not low < high or not math.isfinite(high - low):
        raise ValueError
    return kind(low, high, log=low > 0 and high > 10 * low)


def choices_of(distributions, values):
    if len(set(values)) < max(len(values), 2) or not all(values):
        raise ValueError
    return distributions.CategoricalDistribution(tuple(values))


def as_text(value, kind):
    """A value as short as it can be said within a thousandth of its range, or a hundredth of itself if logarithmic."""
    if not isinstance(value, float):
        return str(value)
    allowed = value / 100 if kind.log else (kind.high - kind.low) / 1000
    texts = [f"{value:.{digits}g}" for digits in range(1, 18)]
    return next(t for t in texts if abs(float(t) - value) <= allowed and kind.low <= float(t) <= kind.high)


class Search:
    """Trials: settings, {option: text} each, and their jobs, which `jobs_of(setting)` makes.

    `key` says what is searched; the file at `path` is continued only with the same.
    """

    def __init__(self, space, trials, key, path, root, jobs_of):
        self.space, self.trials, self.path, self.root, self.jobs_of = space, trials, path, root, jobs_of
        self.key = [*key, {name: str(kind) for name, kind in space.items()}]
        self.settings, self.jobs, self.results = [], [], {}
        found = json.loads(path.read_bytes()) if path.exists() else {"search": self.key, "settings": []}
        if found["search"] != self.key:
            raise ValueError(f"{path} has the trials of another search: give this one another --report")
        self.planned = found["settings"]
        if not all(isinstance(setting, dict) and self.is_in_space(setting) for setting in self.planned):
            raise ValueError(f"{path} has other options than those that are searched")

    def more(self, pending):
        """The jobs of the next trial, given those at work or waiting; none at the end."""
        self.read(pending)
        failures = sum(results is None for results in self.results.values())
        if len(self.jobs) >= self.trials or FAILURES <= failures == len(self.results):
            return []
        if len(self.planned) == len(self.jobs):
            setting = self.ask()
            if setting is None:
                return []
            self.planned.append(setting)
            files.write_text(self.path, json.dumps({"search": self.key, "settings": self.planned}, indent=1))
        self.settings.append(self.planned[len(self.jobs)])
        self.jobs.append(list(self.jobs_of(self.settings[-1])))
        return self.jobs[-1]

    def read(self, pending=()):
        """The results of trials that have ended; None if a run has failed."""
        for number, jobs in enumerate(self.jobs):
            if number not in self.results and not any(job in pending for job in jobs):
                runs = [job.done(self.root) for job in jobs]
                found = [load_results(run / "results.json") for run in runs] if all(runs) else []
                finals = [run["final"] for run in found if "final" in run and SIDE not in run["final"]]
                self.results[number] = finals or None

    def scores(self):
        """{number: mean over its runs} of the trials that are done, and what was measured."""
        finals = {number: rows for number, rows in self.results.items() if rows}
        measure = metric_of(
            {job.env_id for jobs in self.jobs for job in jobs}, [row for rows in finals.values() for row in rows]
        )
        return {number: float(np.mean([row[measure] for row in rows])) for number, rows in finals.items()}, measure

    def best_first(self):
        """[(score, setting, jobs)], those without a score last; and what was measured."""
        self.read()
        scores, measure = self.scores()
        numbers = sorted(range(len(self.jobs)), key=lambda number: -scores.get(number, -math.inf))
        return [(scores.get(number), self.settings[number], self.jobs[number]) for number in numbers], measure

    def ask(self):
        """A setting that is new; None if Optuna finds none."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = int(np.random.SeedSequence(len(self.jobs)).generate_state(1)[0])
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # trials at work count as bad ones
        study = optuna.create_study(direction="maximize", sampler=sampler)
        (scores, _), states = self.scores(), optuna.trial.TrialState
        for number, setting in enumerate(self.settings):
            if number in scores or number not in self.results:
                study.add_trial(
                    optuna.trial.create_trial(
                        state=states.COMPLETE if number in scores else states.RUNNING,
                        value=scores.get(number),
                        params={name: self.value_of(name, text) for name, text in setting.items()},
                        distributions=self.space,
                    )
                )
        for _ in range(DRAWS):
            values = study.ask(self.space).params
            setting = {name: as_text(values[name], kind) for name, kind in self.space.items()}
            if setting not in self.settings:
                return setting
        return None

    def is_in_space(self, setting):
        """What a file has becomes options of scripts: other names, or other options as values, could run code."""
        try:
            for name, kind in self.space.items():
                value = self.value_of(name, setting[name])
                if value not in kind.choices if hasattr(kind, "choices") else not kind.low <= value <= kind.high:
                    return False
        except (KeyError, ValueError, TypeError):
            return False
        return setting.keys() == self.space.keys()

    def value_of(self, name, text):
        kind = self.space[name]
        return text if hasattr(kind, "choices") else type(kind.low)(text)
