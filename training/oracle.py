"""An oracle: observations that tell the other agents' policies."""

import torch


class PartnerOracle:
    """An environment whose observations also tell the other agents' policies, one-hot from the next seat on.

    What a learner gains by it is all that an opponent model could give. For a seat that learns there are zeros.
    """

    def __init__(self, env, team):
        self.plain = env
        self._team = team
        self._used = torch.tensor(team.used, device=env.device)
        self.obs_dim = env.obs_dim + (env.n_agents - 1) * len(team.used)
        self._obs = torch.zeros((env.num_envs, env.n_agents, self.obs_dim), device=env.device)

    def __getattr__(self, name):
        return getattr(self.plain, name)

    @property
    def obs(self):
        return self._obs

    @property
    def while_waiting(self):
        return self.plain.while_waiting

    @while_waiting.setter
    def while_waiting(self, function):
        self.plain.while_waiting = function

    @property
    def places(self):
        """The environment's own function, where it has one: the added columns say nothing of places."""
        places = self.plain.places
        return lambda obs: places(obs[..., : self.plain.obs_dim])

    def reset(self, *args, **options):
        _, info = self.plain.reset(*args, **options)
        return self._add_policies(), info

    def restore(self, snapshot):
        self.plain.restore(snapshot)
        self._add_policies()

    def _add_policies(self):
        n_agents = self.n_agents
        seats = torch.arange(n_agents, device=self.device)
        others = (seats.unsqueeze(1) + seats[1:]) % n_agents  # (n_agents, n_agents - 1)
        policy_id = self._team.policy_id[:, others]
        self._obs[..., self.plain.obs_dim :] = (policy_id.unsqueeze(-1) == self._used).flatten(2)
        return self._updated()

    def step(self, actions):
        _, *results = self.plain.step(actions)
        return self._updated(), *results

    def _updated(self):
        self._obs[..., : self.plain.obs_dim] = self.plain.obs
        return self._obs
