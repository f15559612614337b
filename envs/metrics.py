"""What an opponent model knows, measured on recorded episodes."""

import torch
import torch.nn.functional as F


def masked_mean(mask, values):
    """The mean of the values where the mask is set."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def q_sensitivity(agents, episodes, inputs, inferred):
    """The mean change of Q when what is inferred is exchanged between matches, while the learners of both are alive.

    inputs: (obs, last_action, steps_left) of the episodes.
    """
    obs, last_action, steps_left = inputs
    seat = episodes["seat"][0]
    h = agents.init_hidden(*seat.shape)
    q, _ = agents(obs, last_action, h, seat, inferred)
    exchanged, _ = agents(obs, last_action, h, seat, inferred.roll(1, 1))
    mask = episodes["alive"] & (steps_left > 0).unsqueeze(-1)
    mask &= mask.roll(1, 1)
    return masked_mean(mask.unsqueeze(-1) & episodes["avail"], (q - exchanged).abs()).item()


def hit_ratio(predicted, places, visible, mask, distance):
    """The share of the trajectories' distinct states that are hit by a prediction made before them.

    predicted and places (steps, trajectories, others, 2); visible (steps, trajectories, others); mask (steps,
    trajectories). A hit: all visible others are within `distance` of their predicted places.
    """
    hit = torch.zeros_like(mask)
    for t in range(len(places)):  # step by step: all pairs of steps at once would take gigabytes
        near = (predicted[t] - places[t + 1 :]).square().sum(-1) <= distance**2
        hit[t + 1 :] |= (near | ~visible[t + 1 :]).all(-1) & mask[t]
    hit &= visible.any(-1) & mask
    distinct, found = 0, 0
    for t in range(len(places)):
        same = ((places - places[t]).abs().amax((-1, -2)) < 1e-4) & (visible == visible[t]).all(-1) & mask
        new = mask[t] & ~same[:t].any(0)
        distinct += new.sum()
        found += (new & (same & hit).any(0)).sum()
    return (found / distinct.clamp(min=1)).item()


def linear_probe(features, labels, classes, train):
    """The held-out accuracy of a linear classifier (ridge regression); `train` marks the rows it is fitted to."""
    features = (features - features[train].mean(0)) / features[train].std(0).clamp(min=1e-6)
    x = torch.cat((features, torch.ones_like(features[:, :1])), 1)
    x_train = x[train]
    targets = F.one_hot(labels[train], classes).to(x.dtype)
    ridge = 1e-2 * len(x_train) * torch.eye(x.shape[1], device=x.device)
    weights = torch.linalg.solve(x_train.T @ x_train + ridge, x_train.T @ targets)
    return ((x[~train] @ weights).argmax(1) == labels[~train]).float().mean().item()
