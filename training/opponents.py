"""What opponent models read off recorded episodes: the learner's inputs, and what the others did, saw and are.

The others of a seat are in the order of `team.seat_order`. Rows are steps, and the state at the end.
"""

import torch


def learner_inputs(env, batch):
    """(obs, own last actions, steps left) of episodes, time first; obs is 0 behind an end and for who has left."""
    action, avail, alive = batch["action"][:-1], batch["avail"], batch["alive"]
    steps_left = batch["lengths"] - torch.arange(len(avail), device=avail.device).unsqueeze(1)  # (rows, matches)
    visible = (steps_left >= 0).unsqueeze(-1) & (alive | (not env.leaving_ends))
    obs = torch.where(visible.unsqueeze(-1), batch["obs"], 0.0)
    last_action = torch.cat((torch.full_like(action[:1], -1), action))
    return obs, last_action, steps_left


def others(batch, seat_order, steps_left):
    """(seats, actions, mask) of the others, (steps, matches, seats, others).

    The mask is set where the learner and the other are alive.
    """
    seat = seat_order[batch["seat"][0]][..., 1:].expand(len(steps_left) - 1, -1, -1, -1)
    action = batch["all_action"][:-1].unsqueeze(2).expand(-1, -1, seat.shape[2], -1).gather(-1, seat)
    alive = batch["all_alive"][:-1].unsqueeze(2).expand(-1, -1, seat.shape[2], -1).gather(-1, seat)
    mask = batch["alive"][:-1] & (steps_left[:-1] > 0).unsqueeze(-1)
    return seat, action, mask.unsqueeze(-1) & alive


def others_obs(batch, seat, mask):
    """What the others see, (steps, matches, seats, others, obs_dim), 0 where the mask is not set."""
    obs = batch["all_obs"][:-1].unsqueeze(2).expand(-1, -1, seat.shape[2], -1, -1)
    obs = obs.gather(3, seat.unsqueeze(-1).expand(-1, -1, -1, -1, obs.shape[-1]))
    return torch.where(mask.unsqueeze(-1), obs, 0.0)


def others_policies(batch, seat_order, steps_left, used):
    """(policies, mask) of the others, (rows, matches, seats, others): indices in `used`, where they are known."""
    seat = seat_order[batch["seat"][0]][..., 1:]  # (matches, seats, others)
    policy = batch["policy"][0].unsqueeze(1).expand(-1, seat.shape[1], -1).gather(-1, seat)
    one_hot = (policy.unsqueeze(-1) == used).int()
    mask = (batch["alive"] & (steps_left > 0).unsqueeze(-1)).unsqueeze(-1) & one_hot.any(-1)
    return one_hot.argmax(-1).expand_as(mask), mask
