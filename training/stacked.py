"""Networks of several earlier runs in one batched call: runs whose networks have the layout of iql.py.

Any other run plays through the player that its script loads.
"""

from types import SimpleNamespace

import numpy as np
import torch

from training.episodes import Inputs, load_player, preserved_rng


class StackedNetworks:
    """The networks of several runs with their weights stacked: each acts for the seats assigned to it, in one call."""

    def __init__(self, env, runs, capacity):
        """`runs`: policy_id -> weights; `capacity`: how many seats, of all matches, a run can be assigned"""
        self.env = env
        self.count = 0
        if not runs:
            return
        self.slots = {}  # policy_id -> its networks: one, or one for every seat
        networks = []
        for policy, weights in runs.items():
            layers = layers_of(weights)
            count = len(layers["fc1"][0])
            self.slots[policy] = range(len(networks), len(networks) + count)
            for i in range(count):
                networks.append({name: (weight[i], bias[i]) for name, (weight, bias) in layers.items()})
        self.layers = {}  # name -> weight (networks, inputs, outputs), bias (networks, outputs)
        for name in networks[0]:
            weights, biases = zip(*(network[name] for network in networks))
            self.layers[name] = torch.stack(weights).to(env.device), torch.stack(biases).to(env.device)
        self.count = len(networks)
        self.hidden = torch.zeros(self.count, capacity, self.layers["fc1"][1].shape[1], device=env.device)
        # rows are seats of matches, flattened; each network has `capacity` places for the rows it acts for
        self.rows = torch.zeros(self.count, capacity, dtype=torch.long, device=env.device)
        self.places = torch.zeros((env.num_envs, env.n_agents), dtype=torch.long, device=env.device)
        self.seat_one_hot = torch.eye(env.n_agents, device=env.device).repeat(env.num_envs, 1)
        self.actions = torch.arange(env.n_actions, device=env.device)

    def assign(self, policy_id):
        """Gives every seat (num_envs, n_agents) of these runs a place with its network.

        Unused places act for row 0, and their actions are ignored.
        """
        if not self.count:
            return
        network = np.full(policy_id.size, -1)
        for policy, slots in self.slots.items():
            seat = np.arange(policy_id.shape[1]) if len(slots) > 1 else 0
            of_seat = np.broadcast_to(slots.start + seat, policy_id.shape)
            network = np.where(policy_id.ravel() == policy, of_seat.ravel(), network)
        mine = np.flatnonzero(network >= 0)
        mine = mine[np.argsort(network[mine], kind="stable")]
        network = network[mine]
        place = np.arange(len(network)) - np.searchsorted(network, network)
        rows = np.zeros(self.rows.shape, int)
        rows[network, place] = mine
        places = np.zeros(policy_id.size, int)
        places[mine] = network * rows.shape[1] + place
        self.rows.copy_(torch.from_numpy(rows))
        self.places.copy_(torch.from_numpy(places.reshape(policy_id.shape)))

    def act(self, last_action):
        rows = self.rows.flatten()
        last_action = last_action.flatten()[rows]
        obs = self.env.obs.flatten(0, 1)[rows]
        avail = self.env.info["avail"].flatten(0, 1)[rows]
        x = torch.cat((obs, last_action.unsqueeze(1) == self.actions, self.seat_one_hot[rows]), 1)
        h = self.hidden * (last_action >= 0).view(*self.rows.shape, 1)  # (networks, places, hidden)
        x = self._layer("fc1", x.unflatten(0, self.rows.shape)).relu()
        reset, update, new = self._layer("rnn_input", x).chunk(3, -1)
        reset_h, update_h, new_h = self._layer("rnn_hidden", h).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        self.hidden.copy_(torch.lerp(new, h, torch.sigmoid(update + update_h)))
        q = self._layer("fc2", self.hidden).flatten(0, 1)
        action = q.masked_fill(~avail, -1e9).argmax(1)
        return action[self.places]

    def _layer(self, name, x):
        weight, bias = self.layers[name]
        return torch.baddbmm(bias.unsqueeze(1), x, weight)


# the weights and biases of the stacked layers, in a run with shared parameters and in one with a network for each seat
SHARED = {
    "fc1": ("fc1.weight", "fc1.bias"),
    "rnn_input": ("rnn.weight_ih_l0", "rnn.bias_ih_l0"),
    "rnn_hidden": ("rnn.weight_hh_l0", "rnn.bias_hh_l0"),
    "fc2": ("fc2.weight", "fc2.bias"),
}
PER_SEAT = SHARED | {
    "rnn_input": ("rnn.fc_input.weight", "rnn.fc_input.bias"),
    "rnn_hidden": ("rnn.fc_hidden.weight", "rnn.fc_hidden.bias"),
}


def layers_of(weights):
    """layer -> weight (networks, inputs, outputs), bias (networks, outputs); None if the layout is another one."""
    for names in (SHARED, PER_SEAT):
        if set(weights) == {name for pair in names.values() for name in pair}:
            layers = {layer: (weights[weight], weights[bias]) for layer, (weight, bias) in names.items()}
            if names is SHARED:
                layers = {layer: (weight.T.unsqueeze(0), bias.unsqueeze(0)) for layer, (weight, bias) in layers.items()}
            return layers
    return None


def can_stack(run, env, matches=32, steps=8):
    """Whether a run can act with stacked weights: the layout is known, and its own player takes the same actions.

    The second condition is tested on random inputs: a modified script may use the same layers in another way. A random
    half of the actions is available, for a policy that prefers one action everywhere.
    """
    layers = layers_of(run.weights)
    if layers is None or layers["fc1"][0].shape[1] != env.obs_dim + env.n_actions + env.n_agents:
        return False
    shape = (matches, env.n_agents)
    sizes = {name: getattr(env, name) for name in ("n_agents", "n_actions", "device")}
    test_env = SimpleNamespace(num_envs=matches, **sizes)
    networks = StackedNetworks(test_env, {0: run.weights}, matches * env.n_agents)
    networks.assign(np.zeros(shape, int))
    seats = torch.arange(env.n_agents, device=env.device).repeat(matches, 1)
    player = load_player(run.path, env, seats)
    generator = torch.Generator().manual_seed(0)
    last_action = torch.full(shape, -1, device=env.device)
    player.reset(torch.ones(matches, dtype=torch.bool, device=env.device))
    same = 0
    with torch.no_grad(), preserved_rng(env.device):
        for _ in range(steps):
            test_env.obs = torch.rand((*shape, env.obs_dim), generator=generator).to(env.device)
            noise = torch.rand((*shape, env.n_actions), generator=generator)
            test_env.info = {"avail": (noise <= noise.median(-1, keepdim=True).values).to(env.device)}
            inputs = Inputs(test_env.obs, test_env.info["avail"], last_action, last_action, seats)
            action = player.act(inputs, torch.zeros((), device=env.device))
            same += int((action == networks.act(last_action)).sum())
            last_action = action
    return same >= 0.999 * steps * last_action.numel()
