"""Environments for thousands of matches at a time, on the CPU or on CUDA, with torch tensors in and out.

    env = envs.make("8m", num_envs=1024)
    obs, info = env.reset()
    obs, reward, terminated, truncated, info = env.step(env.scripted_actions("nearest"))

Everything returned is a tensor on the environment's device that the next call overwrites: clone what you keep.
"""

import ast
import difflib
import importlib.metadata
import importlib.util
import inspect
from numbers import Integral

import gymnasium
import torch

from envs import foraging, predator_prey, stag_hunt
from envs.batch import check_whole_number
from envs.battle.battle import Battle, RandomBattle
from envs.battle.data import MAPS, SCENARIOS
from envs.coin_game import IDS as COIN_GAMES
from envs.coin_game import CoinGame
from envs.foraging import Foraging, is_foraging
from envs.kuhn import Kuhn
from envs.matrix_games import GAMES, MatrixGame
from envs.predator_prey import PredatorPrey, is_tag
from envs.snowdrift import IDS as SNOWDRIFTS
from envs.snowdrift import Snowdrift
from envs.stag_hunt import StagHunt, is_hunt

__all__ = ["__version__", "is_simulated", "list_ids", "make", "with_last_actions"]

KINDS = {  # the class of each id; the real game's is imported when it is asked for
    **dict.fromkeys(MAPS, Battle),
    **dict.fromkeys(SCENARIOS, RandomBattle),
    **dict.fromkeys(stag_hunt.IDS, StagHunt),
    **dict.fromkeys(foraging.IDS, Foraging),
    **dict.fromkeys(predator_prey.IDS, PredatorPrey),
    "kuhn": Kuhn,
    **dict.fromkeys(GAMES, MatrixGame),
    **dict.fromkeys(COIN_GAMES, CoinGame),
    **dict.fromkeys(SNOWDRIFTS, Snowdrift),
}
PATTERNS = ("stag_hunt_{height}x{width}_{hares}h{stags}s", foraging.FORM, "simple_tag_{predators}v{prey}")


def _version():
    try:
        return importlib.metadata.version("omg-marl")
    except importlib.metadata.PackageNotFoundError:  # a copy of the repository that is not installed
        return "0+unknown"


__version__ = _version()


def list_ids():
    """The ids that `make` takes; it also takes those of PATTERNS, and pettingzoo:package.module."""
    return [*KINDS, *(f"sc2/{name}" for name in MAPS)]


def names_code(env_id):
    """Whether an id names Python code that is imported: one that a file has is not to be trusted."""
    return env_id.removeprefix("sc2/").startswith("pettingzoo:")


code_asked_for = set()  # such names that `make` was called with; no file gets one that far


def is_simulated(env_id):
    """Whether matches are played here, by the thousand, and not by other programs."""
    return not env_id.startswith(("sc2/", "pettingzoo:"))


def make(env_id, num_envs=1, device="cpu", seed=0, n_agents=None, matches_per_episode=1, **options):
    """A batch of `num_envs` matches of one environment; the options are those of its class.

    They may also be part of the id, as in "coin_game,size=5,rules=lola", which is how a script's --env-id has them.
    With `matches_per_episode` an episode is as many matches in a row; info["match_index"] (num_envs,) counts them.
    """
    name, given = parse_id(env_id)
    kind = _kind(name)
    if names_code(name):
        code_asked_for.add(name)
    for key, value in given.items():
        if options.setdefault(key, value) != value:
            raise ValueError(f"{env_id} has {key}={value!r} in its id, but {options[key]!r} as an option")
    if isinstance(num_envs, bool) or not isinstance(num_envs, Integral) or num_envs < 1:
        raise ValueError(f"num_envs is a whole number from 1 up, not {num_envs!r}")
    num_envs = int(num_envs)
    allowed = ("autoreset", "agent_state", "check", *_options_of(kind))
    for key in options:
        if key not in allowed and kind.passed_on is not None:
            raise ValueError(f"{name} has no option {key!r}: one of {', '.join(allowed)}")
    check_whole_number("matches_per_episode", matches_per_episode, 1, 10_000)
    if matches_per_episode > 1 and not kind.simulated:
        raise ValueError(f"{env_id} is played match by match: matches_per_episode is 1, not {matches_per_episode}")
    device = _device(device, kind)
    batch = kind(name, num_envs, n_agents, device=device, seed=seed, matches_per_episode=matches_per_episode, **options)
    batch.name = env_id
    if n_agents not in (None, batch.n_agents):
        raise ValueError(f"{env_id} is played by {batch.n_agents} agents, not {n_agents!r}")
    return batch


def _options_of(kind):
    """The names of the options of an environment's class."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [
        *(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY),
        *(kind.passed_on or ()),
    ]


def with_last_actions(env_id):
    """The id with obs_last_action=True, where there is such an option and the id does not set it.

    Observations then show the last actions of those in sight. The opponent models read these anyway, so in a comparison
    every method is shown them.
    """
    name, given = parse_id(env_id)
    has_option = "obs_last_action" in _options_of(_kind(name)) and "obs_last_action" not in given
    return f"{env_id},obs_last_action=True" if has_option else env_id


def parse_id(env_id):
    """The name and the options of an id: "coin_game,size=5,rules=lola" has {"size": 5, "rules": "lola"}."""
    if not isinstance(env_id, str) or "," not in env_id:
        return env_id, {}
    name, _, words = env_id.partition(",")
    options = {}
    try:
        call = ast.parse(f"dict({words[:1000]})", mode="eval").body
        if call.func.id != "dict" or call.args or not call.keywords:
            raise ValueError
        for keyword in call.keywords:
            is_word = isinstance(keyword.value, ast.Name)
            options[keyword.arg] = keyword.value.id if is_word else ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, MemoryError):
        options = {None: None}
    if None in options:
        raise ValueError(f"options in an id look like coin_game,size=5,rules=lola, not {env_id!r}")
    return name, options


def _kind(env_id):
    """The class of an id."""
    name = env_id if isinstance(env_id, str) else ""
    if name in KINDS:
        return KINDS[name]
    if is_hunt(name):
        return StagHunt
    if is_foraging(name):
        return Foraging
    if is_tag(name):
        return PredatorPrey
    if name in list_ids():
        from envs.external.starcraft2 import StarCraft2  # only those who ask for it need its package

        return StarCraft2
    if name.startswith("pettingzoo:"):
        from envs.external.pettingzoo_worlds import PettingZooWorld

        return PettingZooWorld
    raise ValueError(f"unknown environment {env_id!r}: {_suggestion(str(env_id)[:100])}envs.list_ids() has all ids")


def _suggestion(env_id):
    """A question with the few ids and patterns that are most like an unknown one; nothing if none is."""
    asked = env_id.lower()
    likeness = {
        name: difflib.SequenceMatcher(None, asked, name.lower()).ratio()
        for name in list_ids()
        if name.startswith("sc2/") == asked.startswith("sc2/")
    }
    enough = max(0.5, max(likeness.values()) - 0.1)
    names = sorted((name for name in likeness if likeness[name] >= enough), key=likeness.get, reverse=True)[:3]
    if names and names[0].lower() == asked:  # only its case is wrong
        return f"did you mean {names[0]}? "
    heads = {pattern: pattern.partition("{")[0].rstrip("_").lower() for pattern in PATTERNS}
    names += [pattern for pattern, head in heads.items() if asked.startswith(head)]
    return f"did you mean {' or '.join(names)}? " if names else ""


def _device(name, kind):
    available = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is not None and device.type == "cuda" and device.index is None and len(available) > 1:
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or (device.type != "cpu" and str(device) not in available):
        raise ValueError(f"there is no device {name!r} here: one of {', '.join(available)}")
    if device.type == "cuda" and kind in KINDS.values() and importlib.util.find_spec("numba_cuda") is None:
        raise ValueError(f'for device {name!r} Numba needs its CUDA part: pip install -e ".[cuda]"')
    return device


for _name in KINDS:
    gymnasium.register(
        f"omg/{_name.replace('/', '-')}-v0",
        entry_point="envs.gym:OneLearner",
        vector_entry_point="envs.gym:OneLearnerVector",
        kwargs={"env_id": _name},
    )
