"""Recorded episodes: values of actions, means over masks, the rows of a life, and what an opponent model knows."""

import torch
import torch.nn.functional as F


def gather_q(q, action):
    """(..., actions), (...) -> (...): a gather whose gradient is fast and deterministic."""
    return torch.where(action.unsqueeze(-1) == torch.arange(q.shape[-1], device=q.device), q, 0.0).sum(-1)


def log_softmax(logits, avail):
    """Log-probabilities of actions (..., actions), among those that are available."""
    return F.log_softmax(logits.masked_fill(~avail, -1e9), -1)


def masked_mean(mask, values):
    """The mean of the values where the mask is set."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def masked_nll(mask, log_probs, target):
    """The mean of -log_probs (..., classes) at targets (...) where the mask is set."""
    target = target.masked_fill(~mask, -100)  # which nll_loss leaves out
    loss = F.nll_loss(log_probs.flatten(0, -2), target.flatten(), reduction="none")
    return loss.sum() / mask.sum().clamp(min=1)


def accuracy(mask, log_probs, target):
    """How often the most probable class (..., classes) is the target (...), where the mask is set."""
    return masked_mean(mask, (log_probs.argmax(-1) == target).float())


def calibration(log_belief, policy, known):
    """Of a belief (matches, seats, others, policies) at the end of matches: what the true policies cost, how probable
    the most probable ones are, and how often they are the true ones.

    policy and known (rows, matches, seats, others): the true ones, and where they are known and matches go on.
    """
    mask, target = known[0], policy[0]
    if not mask.any():
        return {}
    found = {"policy_log_loss": masked_nll(mask, log_belief, target)}
    found["policy_confidence"] = masked_mean(mask, log_belief.max(-1).values.exp())
    found["policy_accuracy"] = accuracy(mask, log_belief, target)
    return {name: value.item() for name, value in found.items()}


def last_alive_row(alive):
    """(rows, matches, seats): the last row of the life that each row is in; for a dead row, of the life before."""
    rows = torch.arange(len(alive), device=alive.device).view(-1, 1, 1)
    next_dead = torch.where(alive, len(alive), rows).flip(0).cummin(0).values.flip(0)
    return torch.where(alive, next_dead - 1, 0).cummax(0).values


def exchanged(policy_id):
    """For every match another one with the same partner policies, and one with different ones; -1: none."""
    kind = torch.unique(policy_id.sort(-1).values.cpu(), dim=0, return_inverse=True)[1].tolist()
    pairs = torch.full((2, len(kind)), -1)
    for match, mine in enumerate(kind):
        later = [(match + k) % len(kind) for k in range(1, len(kind))]
        for row, same in enumerate((True, False)):
            pairs[row, match] = next((other for other in later if (kind[other] == mine) == same), -1)
    return pairs.to(policy_id.device)


def usage(agents, episodes, inputs, inferred):
    """How often the greedy action would be another with what is inferred in another match, while both learners are
    alive.

    `swap_same`: in a match with the same partner policies; `swap_other`: with different ones; `usage`: their
    difference, what depends on these policies. inputs: (obs, last_action, steps_left) of the episodes.
    """
    obs, last_action, steps_left = inputs
    seat = episodes["seat"][0]
    h = agents.init_hidden(*seat.shape)
    alive = episodes["alive"] & (steps_left > 0).unsqueeze(-1)

    def greedy(inferred):
        q, _ = agents(obs, last_action, h, seat, inferred)
        return q.masked_fill(~episodes["avail"], -1e9).argmax(-1)

    action, changed = greedy(inferred), []
    for other in exchanged(episodes["policy_id"]):
        mask = alive & alive[:, other] & (other >= 0).view(1, -1, 1)
        changed.append(masked_mean(mask, (greedy(inferred[:, other]) != action).float()).item() if mask.any() else None)
    metrics = dict(zip(("swap_same", "swap_other"), changed))
    if None not in changed:
        metrics["usage"] = changed[1] - changed[0]
    return {name: value for name, value in metrics.items() if value is not None}


def hit_ratio(predicted, places, visible, mask, distance):
    """The share of predictions of a place that are right: the other comes within `distance` of it later in the match.

    predicted and places (steps, trajectories, others, 2); visible (steps, trajectories, others); mask (steps,
    trajectories). A prediction counts where the other is visible.
    """
    hits, count = 0, 0
    for t in range(len(places) - 1):  # step by step: all pairs of steps at once would take gigabytes
        near = (predicted[t] - places[t + 1 :]).square().sum(-1) <= distance**2
        hit = (near & visible[t + 1 :] & mask[t + 1 :].unsqueeze(-1)).any(0)
        counts = visible[t] & mask[t].unsqueeze(-1) & mask[t + 1].unsqueeze(-1)
        hits, count = hits + (hit & counts).sum(), count + counts.sum()
    return (hits / count.clamp(min=1)).item() if len(places) > 1 else 0.0


def place_errors(predicted, places, visible, mask, ahead):
    """How far predictions of the others' places some steps ahead are off, beside guesses without a model.

    Shapes as above. `place_error_still`: nobody moves; `place_error_moving`: everybody goes on as in the last step.
    """
    if len(places) <= ahead + 1:
        return {}
    now, then, before = places[1:-ahead], places[1 + ahead :], places[: -ahead - 1]
    seen = visible[1:-ahead] & visible[1 + ahead :] & visible[: -ahead - 1]
    seen = seen & (mask[1:-ahead] & mask[1 + ahead :]).unsqueeze(-1)
    guesses = {"place_error": predicted[1:-ahead], "place_error_still": now}
    guesses["place_error_moving"] = now + ahead * (now - before)
    errors = {name: masked_mean(seen, (guess - then).square().sum(-1).sqrt()) for name, guess in guesses.items()}
    return {name: error.item() for name, error in errors.items()}


def place_metrics(env, episodes, steps_left, predicted, obs, ahead):
    """Both of the above for predicted views (rows, matches, seats, obs_dim) and what was seen.

    ahead: how many steps ahead the predictions are, in a string; without a number there are no errors.
    """
    alive = episodes["alive"] & (steps_left >= 0).unsqueeze(-1)
    values = env.places(predicted)[0], *env.places(obs), alive
    by_trajectory = [tensor.flatten(1, 2) for tensor in values]
    metrics = {"hit_ratio": hit_ratio(*by_trajectory, env.hit_distance)}
    return metrics | (place_errors(*by_trajectory, int(ahead)) if ahead.isdigit() else {})


def split_by_seat(seat):
    """(matches,) one half of the matches, with as many of every seat as the other half has."""
    order = torch.argsort(seat[:, 0], stable=True)
    half = torch.zeros(len(seat), dtype=torch.bool, device=seat.device)
    half[order[::2]] = True
    return half


def linear_probe(features, labels, classes, train):
    """The held-out accuracy of a linear classifier (ridge regression); `train` marks the rows it is fitted to."""
    features = (features - features[train].mean(0)) / features[train].std(0, correction=0).clamp(min=1e-6)
    x = torch.cat((features, torch.ones_like(features[:, :1])), 1)
    x_train = x[train]
    targets = F.one_hot(labels[train], classes).to(x.dtype)
    ridge = 1e-2 * len(x_train) * torch.eye(x.shape[1], device=x.device)
    weights = torch.linalg.solve(x_train.T @ x_train + ridge, x_train.T @ targets)
    return ((x[~train] @ weights).argmax(1) == labels[~train]).float().mean().item()


def code_metrics(episodes, steps_left, mean, log_variance):
    """How many dimensions of a code vary, and what share of a sample's variance is noise."""
    mask = episodes["alive"] & (steps_left > 0).unsqueeze(-1)
    if not mask.any():
        return {}
    noise, spread = log_variance[mask].exp().mean(0), mean[mask].var(0, correction=0)
    return {"active_dims": int((spread > 0.01).sum()), "noise_share": (noise / (noise + spread)).mean().item()}


def probes(env, episodes, steps_left, features):
    """How well linear probes read the next seat's policy, in the middle of matches, and its action off features.

    features: those of every step (rows, matches, seats, ...) by the ending of the metrics' names. Probes are fitted to
    half of the matches and tested on the rest.
    """
    seat = episodes["seat"][0]
    rows = len(steps_left)
    mask = episodes["alive"] & (steps_left > 0).unsqueeze(-1)
    train = split_by_seat(seat).view(1, -1, 1).expand_as(mask)
    other = ((seat + 1) % env.n_agents).expand(rows, -1, -1)  # the next seat stands for the team-mates
    policy_id = episodes["policy_id"].expand(rows, -1, -1).gather(-1, other)
    middle = (steps_left - 0.5 * steps_left[0]).abs() <= 0.1 * steps_left[0]
    middle = mask & middle.unsqueeze(-1) & (policy_id >= 0)  # the next seat may be a learner's too
    acts = mask & episodes["all_alive"].gather(-1, other)
    action = episodes["all_action"].gather(-1, other)
    questions = {"next_action_probe": (acts, action, env.n_actions)}
    if len(policy_id[middle].unique()) > 1:
        questions["teammate_probe"] = middle, policy_id, int(policy_id.max()) + 1
    metrics = {}
    for name, (asked, labels, classes) in questions.items():
        if not ((asked & train).any() and (asked & ~train).any()):
            continue
        for ending, values in features.items():
            metrics[name + ending] = linear_probe(values[asked], labels[asked], classes, train[asked])
    return metrics
