"""Learning from recorded episodes before the first step of a run; it can be stopped and resumed after any update.

phases = Phases(runner, optimizers, args.cuda)          # part of the `state` of a run
*rounds, held_out = phases.play(steps)
phases.train("VAE", 1000, update, errors, log)          # 1000 times update(number), now and then errors()
phases.train("CVAE", 100, ...)
"""

from training import checkpoints
from training.episodes import rng_state, set_rng_state
from training.exits import UsageError
from training.log import Progress

LOG_EVERY = 100  # updates


class Phases:
    """Phases of updates, one after the other. Of the episodes no copy is saved: a resumed run plays them again."""

    def __init__(self, runner, optimizers, cuda):
        self.runner, self.optimizers, self.cuda = runner, optimizers, cuda
        self.progress = {"update": 0}  # in all phases
        self.planned = 0  # updates of the phases up to the present one
        self.errors = {}  # as they were logged last
        self.start, self.rng = {"rng": rng_state(cuda), "runner": runner.state_dict()}, None  # before the episodes

    def play(self, steps):
        """At least so many steps, in rounds as EpisodeRunner.collect returns them."""
        self.planned = 0
        set_rng_state(self.start["rng"])
        self.runner.load_state_dict(self.start["runner"])
        with Progress("Pre-training, play of the others: ", steps, "steps") as shown:
            rounds = self.runner.collect(steps, shown.show)
        if self.progress["update"] and self.rng is not None:  # before the first update it follows from the episodes
            set_rng_state(self.rng)
        return rounds

    def train(self, name, updates, update, errors, log, after_update=lambda: None):
        """A phase of so many updates, or what is left of it: update(number of updates made in all phases).

        errors() returns numbers by name.
        """
        first, last = self.planned, self.planned + updates
        self.planned = last
        with Progress(f"Pre-training, {name}: ", updates, "updates", self.progress["update"] - first) as shown:
            while self.progress["update"] < last:
                update(self.progress["update"])
                self.progress["update"] += 1
                done = self.progress["update"]
                if done % LOG_EVERY == 0:
                    self.errors = errors()
                    for key, error in self.errors.items():
                        log.add_scalar(f"pretrain/{key}", error, done)
                shown.show(done - first, ", ".join(f"{key} {error:.4f}" for key, error in self.errors.items()))
                after_update()

    def attend(self, should_stop, show_progress):
        self.runner.attend(should_stop, show_progress)

    def state_dict(self):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"rng": rng_state(self.cuda), "start": self.start, "optimizers": optimizers, **self.progress}

    def load_state_dict(self, state):
        for matches in (state["start"]["runner"], self.runner.state_dict()):  # what does not fit is refused now
            self.runner.load_state_dict(matches)
        self.rng, self.start = state["rng"], state["start"]
        checkpoints.check_rng_states(self.rng, self.start["rng"])
        self.progress = {name: checkpoints.check_count(state, name, type(old)) for name, old in self.progress.items()}
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            checkpoints.load_optimizer(optimizer, saved)


def load_pretrained(option, path, requirements, network, name):
    """Loads a network from the file of an option; one that was made for other requirements is rejected."""
    try:
        networks = checkpoints.read_networks(path, requirements)
        checkpoints.load_weights("it", name, network, networks.get(name, {}))
    except ValueError as error:
        raise UsageError(f"{option} {path}: {error}") from None
