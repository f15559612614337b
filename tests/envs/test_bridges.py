"""The bridges to PettingZoo and Gymnasium: they keep those interfaces, and play what the batch plays."""

import dataclasses
import importlib
import pickle
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, render_test
from pettingzoo.utils import parallel_to_aec

import envs
from envs.battle.data import MAPS
from envs.gym import OneLearner, OneLearnerVector
from envs.pettingzoo import parallel_env

NO_OP, STOP, EAST = 0, 1, 4
NOBODY_LEAVES = ["kuhn", "matrix_ipd", "coin_game", "snowdrift_4x4"]
NAMES = ["3m", "2s3z", "MMM", "stag_hunt", "stag_hunt_4x4", *NOBODY_LEAVES]
SHORT = dataclasses.replace(MAPS["3m"], limit=3)


# ---- PettingZoo ----
@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_api(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(name), num_cycles=1000)


@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_seed(name):
    parallel_seed_test(lambda: parallel_env(name))


@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_render(name):
    render_test(lambda render_mode: parallel_to_aec(parallel_env(name, render_mode=render_mode)))


@pytest.mark.filterwarnings("ignore:Observation")  # it would rather have arrays than a dictionary, and no zeros
@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_turns(name):
    api_test(parallel_to_aec(parallel_env(name)), num_cycles=300)


def test_pettingzoo_renders_only_in_the_mode_it_has():
    env = parallel_env("3m", render_mode="human")
    env.reset()
    with pytest.raises(ValueError, match="rgb_array"):
        env.render()


@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_plays_what_the_batch_plays(name):
    """Actions that are not available too. What was returned before stays as it was."""
    env, batch = parallel_env(name, seed=5), envs.make(name, seed=5, check=False)
    generator = np.random.default_rng(0)
    left_early = set()
    for episode in range(3):
        observations, infos = env.reset()
        obs, info = batch.reset()
        kept = []
        assert env.agents == batch.agents == list(observations) == list(infos)
        while env.agents:
            masks = info["avail"][0].int().numpy()
            for a, agent in enumerate(batch.agents):
                if agent in env.agents:
                    np.testing.assert_array_equal(observations[agent]["observation"], obs[0, a])
                    np.testing.assert_array_equal(observations[agent]["action_mask"], masks[a])
            np.testing.assert_array_equal(env.state(), info["state"][0])
            kept.append((observations, pickle.dumps(observations), env.state(), info["state"][0].clone()))

            playing, actions = list(env.agents), generator.integers(batch.n_actions, size=batch.n_agents)
            given = {agent: actions[a] for a, agent in enumerate(batch.agents) if agent in playing}
            observations, rewards, terminations, truncations, infos = env.step(given)
            obs, reward, terminated, truncated, info = batch.step(actions[None])
            alive = dict(zip(batch.agents, info["alive"][0].tolist()))
            earned = dict(zip(batch.agents, reward[0].tolist()))
            for outcome in (observations, rewards, terminations, truncations, infos):
                assert list(outcome) == playing
            for agent in playing:
                assert env.observation_space(agent).contains(observations[agent])
                assert rewards[agent] == earned[agent] and infos[agent]["won"] == info["won"].item()
                assert terminations[agent] == (terminated.item() or not alive[agent])
                assert truncations[agent] == (truncated.item() and alive[agent])
                assert (agent in env.agents) == (not terminations[agent] and not truncations[agent])
                if not alive[agent]:
                    assert not observations[agent]["observation"].any()
                    left_early |= {(episode, agent)} if env.agents else set()
        assert terminated or truncated
        for observations, before, state, true_state in kept:
            assert pickle.dumps(observations) == before and np.array_equal(state, true_state)
    assert left_early or name in NOBODY_LEAVES, "somebody died while the others played on"


def test_pettingzoo_time_limit_truncates():
    env = parallel_env("3m", map_spec=SHORT)
    env.reset()
    for step in range(3):
        _, _, terminations, truncations, _ = env.step(dict.fromkeys(env.agents, STOP))
        assert not any(terminations.values()) and all(truncations.values()) == (step == 2)
    assert not env.agents


def test_pettingzoo_takes_options_but_not_those_it_sets():
    assert parallel_env("3m", n_agents=5).max_num_agents == 5
    with pytest.raises(ValueError, match="obs_last_action"):
        parallel_env("3m", obs_last_actoin=True)
    for option in ("autoreset", "check", "device", "num_envs"):
        with pytest.raises(TypeError, match=option):
            parallel_env("3m", **{option: 1})


@pytest.mark.parametrize("name", ["3m", "stag_hunt_4x4"])
def test_pettingzoo_with_masks_in_infos_and_the_dead_kept(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(name, mask_in="info", keep_dead=True), num_cycles=200)
    env, batch = parallel_env(name, mask_in="info", keep_dead=True), envs.make(name, check=False)
    generator, dead_steps = np.random.default_rng(0), 0
    for _ in range(3):
        observations, infos = env.reset()
        obs, info = batch.reset()
        terminated = truncated = np.array(False)
        while not (terminated or truncated):
            assert env.agents == batch.agents
            for a, agent in enumerate(batch.agents):
                assert env.observation_space(agent).contains(observations[agent])
                np.testing.assert_array_equal(observations[agent], obs[0, a])
                np.testing.assert_array_equal(infos[agent]["action_mask"], info["avail"][0, a].int())
            actions = generator.integers(batch.n_actions, size=batch.n_agents)
            observations, rewards, terminations, truncations, infos = env.step(dict(zip(batch.agents, actions)))
            obs, reward, terminated, truncated, info = batch.step(actions[None])
            assert list(rewards.values()) == reward[0].tolist()  # the dead share in what their team earns
            alive = info["alive"][0].tolist()
            dead_steps += not all(alive) and not terminated
            for agent, lives in zip(batch.agents, alive):
                out_of_game = truncated.item() and not (lives or batch.team_reward)  # it has nothing to gain any more
                assert terminations[agent] == (terminated.item() or out_of_game)
                assert truncations[agent] == (truncated.item() and not out_of_game)
        assert not env.agents
    assert dead_steps > 0


def test_pettingzoo_masks_are_in_observations_or_infos():
    with pytest.raises(ValueError, match='mask_in is "observation" or "info", not None'):
        parallel_env("3m", mask_in=None)


def test_supersuit_vectorises_it():
    supersuit = pytest.importorskip("supersuit")
    agents = supersuit.pettingzoo_env_to_vec_env_v1(parallel_env("3m", mask_in="info", keep_dead=True))
    many = supersuit.concat_vec_envs_v1(agents, 2, base_class="gymnasium")
    obs, infos = many.reset(seed=0)
    assert obs.shape == (6, 30) and not np.array_equal(obs[:3], obs[3:])
    endings = 0
    for _ in range(100):
        masks = np.array([info["action_mask"] for info in infos])
        obs, _, terminations, truncations, infos = many.step(masks.argmax(1))
        endings += (terminations | truncations).sum()
    assert endings > 0 and endings % 3 == 0  # a match ends for all of its agents at once


def test_torchrl_plays_it():
    libs = pytest.importorskip("torchrl.envs.libs.pettingzoo")
    for options in ({}, {"mask_in": "info", "keep_dead": True}):
        env = libs.PettingZooWrapper(parallel_env("3m", **options), use_mask=not options, done_on_any=False)
        played = env.rollout(200)["marine"]  # random actions, of those that are available
        seen = played["observation"] if options else played["observation", "observation"]
        masks = played["action_mask"]
        assert seen.shape == (len(played), 3, 30) and masks.shape == (len(played), 3, 9) and len(played) > 5
        assert masks[:5].gather(-1, played["action"][:5].unsqueeze(-1)).all()


def test_pettingzoo_can_be_pickled():
    env = parallel_env("3m", seed=3, n_agents=4, mask_in="info", keep_dead=True)
    twin = pickle.loads(pickle.dumps(env))
    assert data_equivalence(env.reset(), twin.reset())
    actions = dict.fromkeys(env.agents, EAST)
    assert data_equivalence(env.step(actions), twin.step(actions))


def test_without_pettingzoo_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    monkeypatch.delitem(sys.modules, "envs.pettingzoo")
    with pytest.raises(ImportError, match=r'pip install -e "\.\[pettingzoo\]"'):
        importlib.import_module("envs.pettingzoo")


# ---- Gymnasium, one match ----
def episode(env, seed=None, actions=EAST, steps=500):
    """What reset and every step to the end of the match returned."""
    history = [env.reset(seed=seed)]
    for _ in range(steps):
        history.append(env.step(actions))
        if history[-1][2] or history[-1][3]:
            break
    return history


def drawn(env):
    """The seats of the learners, and the policies of all seats, by match."""
    matches = env.unwrapped._matches
    return matches.seat.tolist(), [[matches.batch.policies[p] for p in row] for row in matches.policy.tolist()]


def test_every_id_but_those_of_the_real_game_is_registered():
    registered = {name for name in gymnasium.registry if name.startswith("omg/")}
    ids = [name.replace("/", "-") for name in envs.list_ids() if not name.startswith("sc2/")]
    assert registered == {f"omg/{name}-v0" for name in ids} and len(registered) == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in envs.list_ids() if not name.startswith("sc2/")])
def test_registered_ids_work(name):
    env = gymnasium.make(f"omg/{name.replace('/', '-')}-v0", seat="random")
    batch = envs.make(name)
    assert isinstance(env.unwrapped, OneLearner)
    assert env.observation_space.shape == (batch.obs_dim,) and env.action_space.n == batch.n_actions
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert info["state"].shape == (batch.state_dim,) and info["action_mask"].any() and info["won"] is False


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
@pytest.mark.parametrize("seat", [1, "random"])
@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_check(name, seat, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(f"omg/{name}-v0", seat=seat, render_mode=render_mode).unwrapped)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "matrix_ipd"])  # most strategies draw nothing
def test_same_seed_same_episodes(name):
    first, second = (gymnasium.make(f"omg/{name}-v0", seat="random") for _ in range(2))
    played = [episode(first, seed=4), episode(first), episode(first)]
    assert data_equivalence(played, [episode(second, seed=4), episode(second), episode(second)], exact=True)
    assert data_equivalence(played[0], episode(first, seed=4), exact=True)
    assert not data_equivalence(played[0], played[1])
    assert not data_equivalence(played[0], episode(first, seed=5))


def test_without_a_seed_no_two_are_alike():
    first, second = (gymnasium.make("omg/3m-v0") for _ in range(2))
    assert not data_equivalence(first.reset(), second.reset())


def test_every_match_draws_from_the_roster():
    env = gymnasium.make("omg/3m-v0", others=("kite", "random"), seat="random")
    draws = []
    for seed in (0, *[None] * 99):
        env.reset(seed=seed)
        (seat,), (policies,) = drawn(env)
        draws.append((seat, *policies))
    for column, of in enumerate([{0, 1, 2}] + 3 * [{"kite", "random"}]):
        values = [draw[column] for draw in draws]
        assert set(values) == of
        assert all(0.6 / len(of) < values.count(value) / 100 < 1.4 / len(of) for value in of)
    assert len(set(draws)) > 15, "seats draw one by one"


def test_roster_and_seat_have_defaults():
    env = OneLearnerVector("3m", num_envs=20)
    env.reset(seed=0)
    seats, policies = drawn(env)
    assert set(seats) == {0} and {policy for row in policies for policy in row} == {"nearest", "weakest"}
    hunt = OneLearnerVector("stag_hunt_4x4", num_envs=20)
    hunt.reset(seed=0)
    assert {policy for row in drawn(hunt)[1] for policy in row} == {"NS", "NH", "RAND"}


@pytest.mark.parametrize(("seat", "policy"), [(0, "nearest"), (2, "weakest"), (1, "random")])
def test_others_play_their_policy_and_the_learner_its_actions(seat, policy):
    env, batch = gymnasium.make("omg/3m-v0", others=(policy,), seat=seat), envs.make("3m")
    obs, info = env.reset(seed=8)
    expected, batch_info = batch.reset(seed=8)
    terminated = truncated = False
    while not (terminated or truncated):
        np.testing.assert_array_equal(obs, expected[0, seat])
        np.testing.assert_array_equal(info["action_mask"], batch_info["avail"][0, seat].int())
        np.testing.assert_array_equal(info["state"], batch_info["state"][0])
        actions = batch.scripted_actions("hold").clone()[0, seat]
        everyone = batch.scripted_actions(policy)
        everyone[0, seat] = actions
        expected, batch_reward, batch_terminated, batch_truncated, batch_info = batch.step(everyone)
        obs, reward, terminated, truncated, info = env.step(actions.item())
        assert reward == batch_reward[0, seat].item() and info["won"] == batch_info["won"].item()
        assert (terminated, truncated) == (batch_terminated.item(), batch_truncated.item())


@pytest.mark.parametrize("action", [NO_OP, 6, 8, 99, -1])
def test_unavailable_actions_count_as_stop(action):
    """At the start of a match nobody is in reach."""
    first, second = (gymnasium.make("omg/3m-v0", disable_env_checker=True) for _ in range(2))
    first.reset(seed=2)
    second.reset(seed=2)
    assert data_equivalence(first.step(action), second.step(STOP), exact=True)


def test_action_masks_are_those_of_the_info():
    """As booleans, and through wrappers."""
    env = gymnasium.make("omg/3m-v0", seat="random")
    for seed in range(3):
        _, info = env.reset(seed=seed)
        for _ in range(12):
            masks = env.get_wrapper_attr("action_masks")()
            assert masks.dtype == bool and masks.tolist() == info["action_mask"].astype(bool).tolist()
            *_, info = env.step(env.action_space.sample(info["action_mask"]))
        kept = masks.copy()
        env.step(EAST)
        assert np.array_equal(masks, kept)


def test_maskable_ppo_takes_available_actions():
    sb3_contrib = pytest.importorskip("sb3_contrib")
    from sb3_contrib.common.maskable.utils import get_action_masks

    env = gymnasium.make("omg/3m-v0")
    model = sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0)
    model.learn(32)
    masks, actions = model.rollout_buffer.action_masks.reshape(32, 9), model.rollout_buffer.actions.reshape(32)
    assert masks[np.arange(32), actions.astype(int)].all()
    obs, _ = env.reset(seed=0)
    masks = get_action_masks(env)
    assert masks[model.predict(obs, action_masks=masks)[0]]


def test_battle_goes_on_when_the_learner_is_dead():
    env = gymnasium.make("omg/3m-v0", others=("nearest",), seat=1, n_agents=8)
    env.reset(seed=0)
    batch = env.unwrapped._matches.batch
    health = batch.units()["health"].clone()
    health[0, 1] = 0
    health[0, 8:] = 1
    batch.set_units(health=health)
    steps, terminated = 0, False
    while not terminated:
        obs, reward, terminated, truncated, info = env.step(EAST)
        steps += 1
        assert not truncated and not obs.any() and info["action_mask"].tolist() == [1] + 13 * [0]
    assert steps > 1 and info["won"] and reward > 6, "the win counts for the dead too"


def test_hunt_is_over_for_a_learner_who_has_left():
    env = gymnasium.make("omg/stag_hunt_4x4-v0", others=("RAND",), seat=2)
    batch = env.unwrapped._matches.batch
    others_left = 0
    for seed in range(10):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            obs, reward, terminated, truncated, _ = env.step(batch.scripted_actions("NH")[0, 2].item())
            assert (reward > 0) == terminated
        alive = batch.info["alive"][0]
        assert alive[2] == truncated and not (terminated and obs.any())
        others_left += terminated and alive.any().item()
    assert others_left > 0


def test_hunt_goes_on_for_a_learner_who_shares_in_what_the_others_earn():
    env = gymnasium.make("omg/stag_hunt_4x4-v0", seat=2, prosocial=True)
    batch = env.unwrapped._matches.batch
    earned_later = 0
    for seed in range(10):
        env.reset(seed=seed)
        terminated = truncated = left = False
        while not (terminated or truncated):
            _, reward, terminated, truncated, _ = env.step(batch.scripted_actions("NH")[0, 2].item())
            earned_later += left and reward > 0
            left = not batch.info["alive"][0, 2]
        assert terminated == (not batch.info["alive"].any())
    assert earned_later > 0


def test_time_limit_truncates():
    history = episode(gymnasium.make("omg/3m-v0", map_spec=SHORT), seed=0, actions=STOP)
    assert [step[2:4] for step in history[1:]] == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize("others", [(), "nearest", ("nearest", "clever")])
def test_unknown_roster_names_the_policies(others):
    with pytest.raises(ValueError, match=r"others.*nearest, weakest, kite, random, hold"):
        gymnasium.make("omg/3m-v0", others=others)


@pytest.mark.parametrize("seat", [-1, 3, "any", None])
def test_unknown_seat_says_which_there_are(seat):
    with pytest.raises(ValueError, match=r"random.* 0 to 2"):
        gymnasium.make("omg/3m-v0", seat=seat)


@pytest.mark.parametrize("option", ["autoreset", "check", "device", "seed"])
def test_options_that_it_sets_are_refused(option):
    with pytest.raises(TypeError, match=option):
        gymnasium.make("omg/3m-v0", **{option: 1})


# ---- Gymnasium, many matches ----
def three_matches(env_id, **options):
    return gymnasium.make_vec(env_id, num_envs=3, vectorization_mode="vector_entry_point", **options)


@pytest.mark.parametrize("name", NAMES)
def test_many_play_what_one_plays(name):
    """Over several episodes, seats and rosters: the one is match 0 of the many."""
    one, many = (make(f"omg/{name}-v0", seat="random") for make in (gymnasium.make, three_matches))
    assert isinstance(many, OneLearnerVector)
    generator, endings = np.random.default_rng(0), 0
    obs, info = one.reset(seed=6)
    all_obs, infos = many.reset(seed=6)
    for _ in range(250):
        assert many.observation_space.contains(all_obs)
        np.testing.assert_array_equal(obs, all_obs[0])
        assert data_equivalence(info, {key: np_or_bool(infos[key][0]) for key in info}, exact=True)
        actions = generator.integers(many.single_action_space.n, size=3)
        obs, reward, terminated, truncated, info = one.step(actions[0])
        all_obs, rewards, terminations, truncations, infos = many.step(actions)
        assert (reward, terminated, truncated) == (rewards[0], terminations[0], truncations[0])
        over = terminations | truncations
        assert np.array_equal(over, infos.get("_final_obs", np.zeros(3, bool)))
        if over[0]:
            endings += 1
            np.testing.assert_array_equal(obs, infos["final_obs"][0])
            final = {key: np_or_bool(infos["final_info"][key][0]) for key in info}
            assert data_equivalence(info, final, exact=True)
            obs, info = one.reset()
    assert endings > 1


def np_or_bool(value):
    return bool(value) if isinstance(value, np.bool_) else value


def test_match_does_not_depend_on_how_many_are_played_with_it():
    few, many = (OneLearnerVector("3m", num_envs=number, seat="random") for number in (2, 6))
    few.reset(seed=1)
    many.reset(seed=1)
    for step in range(150):
        few_obs, many_obs = few.step(np.full(2, EAST))[0], many.step(np.full(6, EAST))[0]
        np.testing.assert_array_equal(few_obs, many_obs[:2], err_msg=str(step))
    assert [part[:2] for part in drawn(many)] == list(drawn(few))


def test_vector_returns_what_gymnasiums_own_does():
    """The same entries, shapes and types in every step as from Gymnasium's loop over single environments."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    given = {"num_envs": 2, "map_spec": SHORT}
    ours = gymnasium.make_vec("omg/3m-v0", **given)
    theirs = gymnasium.make_vec("omg/3m-v0", vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, **given)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    assert layout(ours.reset(seed=0)) == layout(theirs.reset(seed=0))
    for _ in range(7):
        assert layout(ours.step(np.full(2, STOP))) == layout(theirs.step(np.full(2, STOP)))


def layout(value):
    if isinstance(value, dict):
        return {key: layout(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [layout(entry) for entry in value]
    if value.dtype == object:
        return [layout(entry) for entry in value]
    return value.dtype, value.shape


def test_vector_keeps_what_it_returned():
    env = OneLearnerVector("3m", num_envs=4)
    returned = [env.reset(seed=0)]
    before = pickle.dumps(returned[0])
    returned.append(env.step(np.full(4, EAST)))
    after = pickle.dumps(returned[1])
    env.step(np.full(4, EAST))
    env.reset()
    assert (pickle.dumps(returned[0]), pickle.dumps(returned[1])) == (before, after)


def test_vector_renders_every_match():
    env = gymnasium.make_vec("omg/3m-v0", num_envs=3, render_mode="rgb_array")
    env.reset(seed=0)
    pictures = env.render()
    assert len(pictures) == 3 and all(p.dtype == np.uint8 and p.shape[2] == 3 for p in pictures)
