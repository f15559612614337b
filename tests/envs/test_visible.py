"""Whom agents see, and whose last actions: of who is out of sight nobody learns what it did."""

import pytest
import torch
from reference import make_runner, seat_order

import envs

LIMITED = {  # worlds with limited sight, and how many matches show somebody who is not seen
    "Foraging-8x8-3p-2f-v3,player_sight=2": 8,
    "Foraging-2s-8x8-2p-2f-v3": 8,
    "popp": 8,
    "stag_hunt,view_radius=1": 8,
    "2s3z": 8,
}


def others_seen(env, a):
    """(matches, others), read off the observations of agent a."""
    return env.places(env.obs[:, a])[1][..., 1 - env.n_agents :]


@pytest.mark.parametrize("env_id", LIMITED)
def test_visible_is_what_observations_show(env_id):
    env, hidden = envs.make(env_id, num_envs=8), 0
    env.reset(seed=1)
    for _ in range(10):
        env.step(env.scripted_actions("random" if "random" in env.policies else env.policies[0]))
        for a in range(env.n_agents):
            visible, seen = env.visible[:, a, seat_order(env, a)[1:]], others_seen(env, a)
            if env_id.startswith("Foraging"):  # slots are filled from the first on, whoever is in them
                visible, seen = visible.sum(1), seen.sum(1)
            assert torch.equal(visible, seen) and env.visible[:, a, a].all()
            hidden += int((~env.visible[:, a]).any(1).sum())
    assert hidden >= LIMITED[env_id]


@pytest.mark.parametrize("env_id", ["foraging_orders,player_sight=1", "popp", "snowdrift_4x4", "coin_game"])
def test_observations_can_show_the_last_actions_of_who_is_seen(env_id):
    env, plain = envs.make(f"{env_id},obs_last_action=True", num_envs=8), envs.make(env_id, num_envs=8)
    shown = env.obs_dim - plain.obs_dim
    assert shown == (env.n_agents - 1) * env.n_actions and env.about_others[-shown:].all()
    obs, _ = env.reset(seed=3)
    plain.reset(seed=3)
    assert torch.equal(obs[..., :-shown], plain.obs) and not obs[..., -shown:].any()
    unseen, running = 0, torch.ones(8, dtype=torch.bool)
    for _ in range(6):
        actions = env.scripted_actions(env.policies[0]).clone()
        obs, _, terminated, *_ = env.step(actions)
        plain.step(actions)
        assert torch.equal(obs[..., :-shown], plain.obs)
        for found, wanted in zip(env.places(obs), plain.places(plain.obs)):
            assert torch.equal(found, wanted)
        columns = obs[..., -shown:].unflatten(-1, (-1, env.n_actions))
        for a in range(env.n_agents):
            for k, b in enumerate(seat_order(env, a)[1:]):
                one_hot = torch.nn.functional.one_hot(actions[:, b].long(), env.n_actions).float()
                seen = env.visible[:, a, b].unsqueeze(1)
                assert torch.equal(columns[running, a, k], (one_hot * seen)[running])
                unseen += int((~seen).sum())
        running &= ~terminated
    assert unseen > 0 or env.visible.all()


def test_comparisons_show_the_last_actions_where_they_can_be_shown():
    ids = {"8m": True, "popp,limit=9": True, "stag_hunt": False, "kuhn": False, "3m,obs_last_action=False": False}
    for env_id, changes in ids.items():
        shown = envs.with_last_actions(env_id)
        assert shown == (f"{env_id},obs_last_action=True" if changes else env_id)
        envs.make(shown)


@pytest.mark.parametrize("name", ["omg_iql", "naive_om_iql", "belief_iql"])
def test_models_read_the_last_actions_of_who_is_seen_alone(name):
    """Acting and learning read the same: what is recorded, -1 for who is out of sight."""
    _, runner = make_runner(name, "foraging_orders,player_sight=1", "1inside1learner", num_envs=8)
    env, read, visible = runner.env, [], [runner.env.visible.clone()]
    act, step = runner.player.act, env.step

    def recorded_act(inputs, epsilon):
        read.append(inputs.visible_last_action.clone())
        return act(inputs, epsilon)

    def recorded_step(actions):
        result = step(actions)
        visible.append(env.visible.clone())
        return result

    runner.player.act, env.step = recorded_act, recorded_step
    runner.play(1.0)
    episodes, seats, unseen = runner.episodes, runner.team.learner_seats, 0
    visible = visible[-len(read) - 1 :]
    for t, given in enumerate(read):
        assert torch.equal(given, episodes["visible_last_action"][t])
        for m, (seat,) in enumerate(seats.tolist()):
            for b in range(env.n_agents):
                seen = t > 0 and (b == seat or bool(visible[t][m, seat, b]))
                wanted = int(episodes["all_action"][t - 1, m, b]) if seen else -1
                assert int(given[m, 0, b]) == wanted
                unseen += not seen and t > 0
    assert unseen > 20
