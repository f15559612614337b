"""The environments and teams that the options of a script ask for."""

import envs
from training.exits import UsageError
from training.oracle import PartnerOracle
from training.run import seed_for
from training.team import Team


def set_up(args, make_env, make_team, device):
    """(environment, team) of training, and those of evaluations, by a script's functions; with --oracle in their view.

    The real game has one environment for both.
    """
    env = make_env(args, args.num_envs, device, "training")
    eval_env = make_env(args, args.eval_episodes, device, "evaluation") if env.simulated else env
    team = make_team(args, env, "training")
    eval_team = make_team(args, eval_env, "evaluation")
    if getattr(args, "oracle", False):
        env, eval_env = PartnerOracle(env, team), PartnerOracle(eval_env, eval_team)
    return env, team, eval_env, eval_team


def make_env(args, num_envs, device, purpose, **options):
    """The environment of --env-id; that of another purpose has other random numbers. `options`: more of envs.make."""
    seed = seed_for(args.seed, purpose)
    matches = args.matches_per_partner if _persists_hidden(args) else 1  # of an episode
    try:
        return envs.make(args.env_id, num_envs, device, seed, args.n_agents, matches, check=False, **options)
    except ValueError as error:
        raise UsageError(f"--env-id {args.env_id}: {error}") from None


def make_team(args, env, purpose, learners=("learner",), teammates_everywhere=False):
    """The team of --team; `learners`: the names that it may have for the learner's seats."""
    options = (args.pool, args.seat, args.mix_teammates, args.teammate_epsilon)
    seed = seed_for(args.seed, purpose)
    matches = 1 if _persists_hidden(args) else args.matches_per_partner  # episodes with the same partners
    try:
        return Team(env, args.team, learners, *options, seed, teammates_everywhere, matches)
    except ValueError as error:
        raise UsageError(f"--team {args.team}: {error}") from None


def _persists_hidden(args):
    """Whether the matches with the same partners are one episode; not every script has that option."""
    return getattr(args, "persist_hidden", False)
