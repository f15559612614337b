"""For the tests of opponent models: random episodes, losses by plain loops, and whether a change of a batch matters."""

import contextlib
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SCRIPTS, scramble

import omg_iql
from training.episodes import EpisodeRunner

CPU = torch.device("cpu")
NO_LOG = SimpleNamespace(add_scalar=lambda *_: None)
LENGTHS, SEATS = (5, 8, 3, 6), ((0, 2), (1, 2), (0, 1), (2, 0))
POLICIES = (2, 5, 6)  # what the others of a batch have
DEATHS = ((0, 0, 3), (1, 2, 2), (2, 1, 1))  # match, agent, the first row in which it is dead


# ---- learners, batches and runners ----
def env_spec(**changes):
    """What a learner reads of an environment."""
    spec = {
        "n_agents": 3, "n_actions": 4, "obs_dim": 5, "state_dim": 7, "episode_limit": 8, "team_reward": True,
        "return_scale": 2.0,
        "ego_first": False, "device": CPU,
        "about_others": torch.tensor([False, True, False, True, True]),
    }  # fmt: skip
    spec |= changes
    return SimpleNamespace(**spec, matches_per_episode=1, leaving_ends=not spec["team_reward"])


def random_learner(name, env, seed=0, **options):
    """A small learner with weights so large that outputs are far from equal."""
    torch.manual_seed(seed)
    small = {
        "hidden_dim": 6,
        "latent_dim": 4,
        "horizon": 3,
        "steps_ahead": 2,
        "td_lambda": 0.6,
        "gamma": 0.9,
        "kl_weight": 0.01,
    }
    module, used = SCRIPTS[name], [POLICIES] if name == "belief_iql" else []
    small |= omg_iql.PAPER if options.get("paper") else {}
    small = {key: value for key, value in small.items() if key in module.Args.__dataclass_fields__}
    args = module.Args(**{**small, **options})
    module.check_args(args)
    learner = scramble(module.Learner(args, env, *used), 0.5)
    with torch.no_grad():  # through several wide layers numbers grow, until one term of a loss drowns the others
        for layer in learner.model.modules():
            if isinstance(layer, torch.nn.Linear) and layer.in_features == 128:
                layer.weight.mul_(0.2)
    return learner


def random_batch(env, lengths=LENGTHS, seats=SEATS, deaths=DEATHS, latent_dim=4, seed=1):
    """Random episodes to learn from; `seats` (matches, seats of the learner)."""
    generator = torch.Generator().manual_seed(seed)
    matches, rows, seats = len(lengths), max(lengths) + 2, torch.tensor(seats)

    def normal(*shape):
        return torch.randn((rows, matches, *shape), generator=generator)

    learners = seats.shape[1]
    batch = {
        "all_obs": normal(env.n_agents, env.obs_dim), "state": normal(env.state_dim), "reward": normal(learners),
        "avail": normal(learners, env.n_actions) > 0, "all_alive": torch.ones(rows, matches, env.n_agents).bool(),
        "all_action": torch.randint(env.n_actions, (rows, matches, env.n_agents), generator=generator),
        "terminated": torch.zeros(rows, matches, dtype=torch.bool), "mean": normal(learners, latent_dim),
        "log_variance": normal(learners, latent_dim), "seat": seats.unsqueeze(0), "lengths": torch.tensor(lengths),
    }  # fmt: skip
    batch["avail"][..., 0] = True
    batch["policy"] = torch.tensor(POLICIES)[torch.randint(3, (1, matches, env.n_agents), generator=generator)]
    batch["evidence"] = normal(learners, env.n_agents - 1, len(POLICIES))[:1]
    for match, length in enumerate(lengths):
        batch["terminated"][length - 1 :, match] = match % 2 == 0  # the others are truncated
    for match, agent, row in deaths:
        batch["all_alive"][row:, match, agent] = False
    for name in ("action", "alive", "obs"):
        batch[name] = torch.stack([batch[f"all_{name}"][:, m, seats[m]] for m in range(matches)], 1)
    last_action = torch.cat((torch.full((1, matches, env.n_agents), -1), batch["all_action"][:-1]))
    seen = (normal(learners, env.n_agents) > -0.5) | (seats.unsqueeze(-1) == torch.arange(env.n_agents))
    batch["visible_last_action"] = torch.where(seen, last_action.unsqueeze(2), -1)
    return batch


def make_runner(name, env_id, team, num_envs=6, seed=1, **options):
    """(a learner with twice the usual weights, a runner that plays its online network)"""
    torch.manual_seed(seed)
    module = SCRIPTS[name]
    if name == "omg_iql":
        options = {"latent_dim": 8, **options}
    args = module.Args(env_id=env_id, team=team, num_envs=num_envs, hidden_dim=16, **options)
    env = module.make_env(args, num_envs, CPU, str(seed))
    team = module.make_team(args, env, str(seed))
    learner = module.Learner(args, env, *([team.used] if name == "belief_iql" else []))
    with torch.no_grad():
        for network in (learner.agents, learner.model):
            for weights in network.parameters():
                weights.mul_(2)
    player = module.Player(learner, learner.agents, team.learner_seats)
    fields = (
        *module.FIELDS,
        "all_action",
        "terminated",
        *(("state", "mean", "log_variance") if name == "omg_iql" else ()),
    )
    return learner, EpisodeRunner(env, team, player, dict.fromkeys(fields))


# ---- exact Bayes: how probable a player's actions are, up to what is the same for all strategies ----
def memory_one_log_likelihood(strategy, actions, seat):
    """Of a seat's actions in a matrix game; strategy: probabilities of 0 at the start and after CC, CD, DC, DD."""
    total, chance = 0.0, strategy[0]
    for pair in actions:
        mine, yours = pair[seat], pair[1 - seat]
        total += math.log(max(chance if mine == 0 else 1 - chance, 1e-300))
        chance = strategy[1 + 2 * mine + yours]
    return total


def kuhn_log_likelihood(strategy, actions, cards):
    """Of the second player's actions in hands of Kuhn poker, and of its cards, which are shown at the end of a hand.

    actions and cards: both players', step by step; 2 is a bet and the king. The last hand may have no end.
    """
    total, hand, (*_, eta, xi) = 0.0, [], strategy
    for t, pair in enumerate(actions):
        hand.append(pair[len(hand) % 2])
        bets_again = len(hand) == 2 and hand[0] != 2 and hand[1] == 2
        if len(hand) == 2:
            bets = (0, eta, 1) if hand[0] == 2 else (xi, 0, 1)  # by card
            chances = [bet if hand[1] == 2 else 1 - bet for bet in bets]
            mine, yours = cards[t]
            hidden = sum(chance for card, chance in enumerate(chances) if card != mine) / 2
            shown = not bets_again or t + 1 < len(actions)
            total += math.log(max(chances[yours] if shown else hidden, 1e-300))
        if len(hand) == 3 or (len(hand) == 2 and not bets_again):
            hand = []
    return total


# ---- networks, one step of one seat at a time ----
def linear(layer, x):
    return layer.weight.detach().double().numpy() @ x + layer.bias.detach().double().numpy()


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def gru(layer, x, h):
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w, u, b, c = (getattr(layer, name).detach().double().numpy() for name in names)
    (reset, update, new), (reset_h, update_h, new_h) = np.split(w @ x + b, 3), np.split(u @ h + c, 3)
    update, new = sigmoid(update + update_h), np.tanh(new + sigmoid(reset + reset_h) * new_h)
    return (1 - update) * new + update * h


def one_hot(index, size):
    return np.eye(size)[index] if index >= 0 else np.zeros(size)


def q_step(agents, env, obs, last_action, seat, inferred, h):
    x = np.concatenate((obs, one_hot(last_action, env.n_actions), one_hot(seat, env.n_agents)))
    if hasattr(agents, "gate"):
        inferred = mixed(agents, inferred)
    x = np.concatenate((x, inferred))
    h = gru(agents.rnn, relu(linear(agents.fc1, x)), h)
    q = linear(agents.fc2, h)
    return q if agents.value is None else linear(agents.value, h) + q - q.mean(), h


def mixed(agents, embeddings):
    """Each feature of the four embeddings, projected to mean 0 and variance 1, by weights that add up to 1."""
    projected = []
    for (project, norm), embedding in zip(agents.project, np.split(embeddings, 4)):
        x = linear(project, embedding)
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        projected.append(norm.weight.detach().double().numpy() * x + norm.bias.detach().double().numpy())
    scores = linear(agents.gate, np.concatenate(projected)).reshape(4, -1)
    weights = np.exp(log_softmax(scores.T)).T  # over the experts, by feature or for all features
    return np.sum(weights * projected, 0)


def gaussian(code, x):
    mean, log_variance = np.split(linear(code, x), 2)
    return mean, np.clip(log_variance, -10, 10)


def leaky_layers(layers, x):
    for layer in (layers[0], layers[2]):
        x = linear(layer, x)
        x = np.where(x > 0, x, 0.01 * x)
    return x


def encode(vae, x):
    return gaussian(vae.code, leaky_layers(vae.encoder, x))


def decode(vae, code):
    return linear(vae.out, leaky_layers(vae.decoder, code))


def decoding_error(vae, code, state):
    """Of each feature: cross-entropy where it is 0 or 1, else squared."""
    x, binary = decode(vae, code), vae.binary.numpy()
    entropy = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0) - x * state
    return np.where(binary, entropy, (x - state) ** 2)


def kl(mean, log_variance, other_mean, other_log_variance):
    ratio = np.exp(log_variance - other_log_variance)
    return 0.5 * np.sum(ratio - 1 - np.log(ratio) + (mean - other_mean) ** 2 / np.exp(other_log_variance))


def seat_order(env, seat):
    """The learner's seat, then the others in the order of its observation."""
    if env.ego_first:
        return [(seat + a) % env.n_agents for a in range(env.n_agents)]
    return [seat, *(a for a in range(env.n_agents) if a != seat)]


def past_inputs(learner, data, m, place, t):
    """What a model that knows everybody's actions, as far as they can be seen, reads of the step before t."""
    env, order = learner.env, seat_order(learner.env, int(data["seat"][0, m, place]))
    actions = [one_hot(data["visible_last_action"][t, m, place, a], env.n_actions) for a in order]
    return np.concatenate((data["obs"][t - 1, m, place] if t else np.zeros(env.obs_dim), *actions))


# ---- losses ----
def plain_losses(name, learner, batch):
    """Means by name: "td", "model" (the whole loss of the opponent model), and its terms.

    Samples of a code are its mean, and OMG's subgoals are not mixed.
    """
    data, terms = as_numpy(batch), defaultdict(list)
    model_terms = {
        "naive_om_iql": naive_terms, "liam_iql": liam_terms, "omg_iql": omg_terms, "mix_iql": mix_terms,
        "belief_iql": naive_terms,
    }[name]  # fmt: skip
    for m, length in enumerate(batch["lengths"].tolist()):
        for place in range(batch["seat"].shape[2]):
            inferred = model_terms(learner, data, m, place, length, terms)
            inferred = inferred if isinstance(inferred, tuple) else (inferred, inferred)
            terms["td"] += [error**2 for error in td_errors(learner, data, m, place, inferred)]
    if name == "mix_iql":
        contrastive_terms(terms, learner.args.temperature)
    means = {key: np.mean(values) for key, values in terms.items()}
    weights = dict.fromkeys(("cross_entropy", "policy_error", "obs_error", "vae", "state_error", "return_loss"), 1.0)
    if name == "liam_iql":
        weights = {"reconstruction": 1.0}
    if name == "omg_iql":
        weights |= {"recon": learner.args.inference_weight}
        weights |= {"kl": learner.args.inference_weight * learner.args.kl_weight}
    means["model"] = sum(weight * means.get(key, 0.0) for key, weight in weights.items())
    return means


def as_numpy(batch):
    return {
        name: values.double().numpy() if values.is_floating_point() else values.numpy()
        for name, values in batch.items()
    }


def td_errors(learner, data, m, place, inferred):
    """Of the steps of one match and seat; inferred: what the Q-network and the target network read."""
    args, env, networks = learner.args, learner.env, (learner.agents, learner.target_agents)
    same_subgoal = getattr(args, "bootstrap_subgoal", "next") == "same"
    seat, length = int(data["seat"][0, m, place]), len(inferred[0]) - 1
    obs, avail, action, alive = (data[name][:, m, place] for name in ("obs", "avail", "action", "alive"))
    hidden, unrolled = [np.zeros(args.hidden_dim)] * 2, []
    for t in range(length + 1):
        inputs = (obs[t], action[t - 1] if t else -1, seat)
        values, hidden = zip(*(q_step(n, env, *inputs, read[t], h) for n, read, h in zip(networks, inferred, hidden)))
        unrolled.append((values, hidden))
    next_target, errors = 0.0, []
    for t in reversed(range(length)):
        q, target_q = unrolled[t + 1][0]
        if same_subgoal:
            inputs, hidden = (obs[t + 1], action[t], seat), unrolled[t][1]
            q, target_q = (q_step(n, env, *inputs, read[t], h)[0] for n, read, h in zip(networks, inferred, hidden))
        next_value = target_q[np.argmax(np.where(avail[t + 1], q, -np.inf))]
        if t == length - 1:
            next_target = next_value
        target = 5 / env.return_scale * data["reward"][t, m, place]
        if not data["terminated"][t, m] and (env.team_reward or alive[t + 1]):
            target += args.gamma * ((1 - args.td_lambda) * next_value + args.td_lambda * next_target)
        next_target = target
        if env.team_reward or alive[t]:
            errors.append(unrolled[t][0][0][action[t]] - target)
    return errors


def naive_terms(learner, data, m, place, length, terms):
    env, model, h, inferred = learner.env, learner.model, np.zeros(96), []
    for t in range(length + 1):
        h = gru(model.rnn, past_inputs(learner, data, m, place, t), h)
        x = np.concatenate((relu(linear(model.fc_obs, data["obs"][t, m, place])), h))
        x = linear(model.fc1, x)
        features, x = x[: -model.head.in_features], relu(x[-model.head.in_features :])
        x = linear(model.head, x).reshape(env.n_agents - 1, -1)
        log_probs = log_softmax(x[:, : env.n_actions])
        inferred.append(np.exp(log_probs).ravel())
        if t < length:
            prediction_terms(env, data, m, place, t, terms, log_probs)
        if hasattr(model, "belief_shape"):
            belief = belief_terms(learner, data, m, place, t, length, terms, x[:, env.n_actions :])
            inferred[-1] = np.concatenate((features, inferred[-1], belief))
    return inferred


def belief_terms(learner, data, m, place, t, length, terms, scores):
    """Adds what the belief in the true policies costs; returns the belief: this match and what earlier ones showed."""
    others = seat_order(learner.env, int(data["seat"][0, m, place]))[1:]
    log_belief = log_softmax(log_softmax(scores) + data["evidence"][0, m, place])
    if t < length and data["alive"][t, m, place]:
        for number, other in enumerate(others):
            kind = learner.used.tolist().index(data["policy"][0, m, other])
            terms["policy_error"].append(-log_belief[number][kind])
            terms["policy_accuracy"].append(np.argmax(log_belief[number]) == kind)
    return np.exp(log_belief).ravel()


def liam_terms(learner, data, m, place, length, terms):
    env, model, h, inferred = learner.env, learner.model, np.zeros(128), []
    others = seat_order(env, int(data["seat"][0, m, place]))[1:]
    for t in range(length + 1):
        h, code = encode_own_past(model, env, data, m, place, t, h)
        inferred.append(code)
        if t == length:
            break
        log_probs = log_softmax(layers(model.action_decoder, code).reshape(-1, env.n_actions))
        predicted_obs = layers(model.obs_decoder, code).reshape(-1, env.obs_dim)
        prediction_terms(env, data, m, place, t, terms, log_probs, predicted_obs)
        costs = []
        for number, other in enumerate(others):
            if data["alive"][t, m, place] and data["all_alive"][t, m, other]:
                squared = sum((predicted_obs[number] - data["all_obs"][t, m, other]) ** 2)
                costs.append(squared / 2 - log_probs[number, data["all_action"][t, m, other]])
        if costs:
            terms["reconstruction"].append(sum(costs))
    return inferred


def encode_own_past(model, env, data, m, place, t, h):
    """(hidden state, embedding) at step t, from the learner's own observation and last action."""
    last_action = one_hot(data["action"][t - 1, m, place] if t else -1, env.n_actions)
    h = gru(model.rnn, np.concatenate((data["obs"][t, m, place], last_action)), h)
    return h, linear(model.fc2, relu(linear(model.fc1, h)))


def layers(decoder, x):
    return linear(decoder[4], relu(linear(decoder[2], relu(linear(decoder[0], x)))))


def mix_terms(learner, data, m, place, length, terms):
    env, args, model, h, inferred = learner.env, learner.args, learner.model, np.zeros(128), []
    alive = data["alive"][:, m, place]
    for t in range(length + 1):
        h, codes = encode_own_past(model, env, data, m, place, t, h)
        inferred.append(codes)
        if t == length:
            break
        action_code, obs_code, state_code, return_code = np.split(codes, 4)
        log_probs = log_softmax(layers(model.action_decoder, action_code).reshape(-1, env.n_actions))
        predicted_obs = layers(model.obs_decoder, obs_code).reshape(-1, env.obs_dim)
        prediction_terms(env, data, m, place, t, terms, log_probs, predicted_obs)
        if alive[t]:
            later = data["state"][min(t + args.steps_ahead, length), m]
            terms["state_error"].append(np.mean((layers(model.state_decoder, state_code) - later) ** 2))
            earned = [
                learner.reward_scale * args.gamma ** (k - t) * data["reward"][k, m, place]
                for k in range(t, length) if env.team_reward or alive[k]
            ]  # fmt: skip
            terms["return codes"].append((t, place, return_code, layers(model.return_encoder, np.array([sum(earned)]))))
    return inferred


def contrastive_terms(terms, temperature):
    """Adds what it costs to pick one's own return among those of the matches that are at the same step."""

    def score(code, target):
        return code @ target / np.linalg.norm(code) / np.linalg.norm(target) / temperature

    codes = terms.pop("return codes")
    for t, place, code, target in codes:
        scores = [score(code, other) for s, seat, _, other in codes if (s, seat) == (t, place)]
        terms["return_loss"].append(np.log(np.sum(np.exp(scores))) - score(code, target))


def prediction_terms(env, data, m, place, t, terms, log_probs, predicted_obs=None):
    """Adds what predictions of the others at step t cost: those of dead others, or of a dead learner, nothing."""
    for number, other in enumerate(seat_order(env, int(data["seat"][0, m, place]))[1:]):
        if data["alive"][t, m, place] and data["all_alive"][t, m, other]:
            action = data["all_action"][t, m, other]
            terms["cross_entropy"].append(-log_probs[number, action])
            terms["correct"].append(np.argmax(log_probs[number]) == action)
            if predicted_obs is not None:
                terms["obs_error"].append(np.mean((predicted_obs[number] - data["all_obs"][t, m, other]) ** 2))


def plain_inference(learner, model, data, m, place, length):
    """OMG's inference at each step of a match: (mean, log-variance, reconstruction error)."""
    h, inferred = np.zeros(model.hidden_dim), []
    for t in range(length + 1):
        obs = data["obs"][t, m, place]
        h = gru(model.rnn, past_inputs(learner, data, m, place, t), h)
        features = relu(linear(model.fc_obs, obs))
        code = gaussian(model.code, relu(linear(model.fc1, np.concatenate((features, h)))))
        error = None
        if learner.args.predict != "future":
            x = relu(linear(model.decoder, np.concatenate((code[0], h))))
            original = features if learner.args.predict == "features" else obs
            error = np.mean((linear(model.out, x) - original) ** 2)
        inferred.append((*code, error))
    return inferred


def omg_terms(learner, data, m, place, length, terms):
    args, env = learner.args, learner.env
    seat = int(data["seat"][0, m, place])
    obs, avail, action, alive = (data[name][:, m, place] for name in ("obs", "avail", "action", "alive"))
    about_others = env.about_others.numpy()
    states = {"others": obs[:, about_others], "obs": obs, "state": data["state"][:, m]}[args.subgoal_input]
    last_row = sum(alive[: length + 1]) - 1
    inferred, by_target = (
        plain_inference(learner, model, data, m, place, length)
        for model in (learner.model, learner.model if args.paper else learner.target_model)
    )

    choose = max if args.subgoal_mode == "optimistic" else min
    h, subgoals, target_subgoals = np.zeros(args.hidden_dim), [], []
    for t in range(length):
        last_action = action[t - 1] if t else -1
        candidates = []
        for k in range(1, args.horizon + 1) if args.selector == "value" else [int(args.selector)]:
            state = states[min(t + k, last_row)]
            code = encode(learner.model.vae, state)
            q, _ = q_step(learner.agents, env, obs[t], last_action, seat, code[0], h)
            candidates.append((np.mean(q[avail[t]]), code, state))
        _, selected, state = choose(candidates, key=lambda candidate: candidate[0])
        mean, log_variance, error = inferred[t]
        if args.predict == "future":
            error = decoding_error(learner.model.vae, mean, state).sum()
        _, h = q_step(learner.agents, env, obs[t], last_action, seat, mean, h)
        subgoals.append(selected[0] if args.q_subgoal == "selected" else mean)
        target_subgoals.append(subgoals[t] if args.q_subgoal == "selected" else by_target[t][0])
        if alive[t]:
            target = selected
            if args.mix == "kl-target":  # the probability of the selected one is 0
                target = data["mean"][t, m, place], data["log_variance"][t, m, place]
            terms["recon"].append(error)
            terms["kl"].append(kl(mean, log_variance, *target))
    for state in states[: last_row + 1] if not args.paper else ():  # the VAE goes on learning
        mean, log_variance = encode(learner.model.vae, state)
        error = decoding_error(learner.model.vae, mean, state).sum()
        terms["vae"].append(error + args.vae_kl_weight * kl(mean, log_variance, 0.0, 0.0))
    return [*subgoals, inferred[length][0]], [*target_subgoals, by_target[length][0]]


# ---- gradients, and what a change of a batch does to them ----
def loss_of(learner, batch):
    """(loss, logs) of an update, before its backward pass; OMG's update computes its two losses itself."""
    if hasattr(learner, "loss"):
        return learner.loss(batch)
    found, logs = [], {}

    def recorded(compute):
        def wrapper(*args):
            results = compute(*args)
            logs.update(results[-1])
            return results

        return wrapper

    def stop(loss):
        found.append(loss)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(InterruptedError):
        for name in ("td_loss", "model_loss"):
            patch.setattr(learner, name, recorded(getattr(learner, name)))
        patch.setattr(torch.Tensor, "backward", stop)
        learner.update(batch)
    return found[0], logs


def losses(learner, batch):
    """(the TD loss, the opponent model's loss), always with the same random numbers; their sum is what is learned."""
    torch.manual_seed(3)
    total, logs = loss_of(learner, batch)
    td, model = logs["losses/td_loss"], logs["omg/loss" if "omg/loss" in logs else "om/loss"]
    torch.testing.assert_close(total, td + model, rtol=0, atol=0)
    return td, model


def gradients(learner, batch, which):
    """(loss, name -> gradient) of the TD loss (0) or the opponent model's (1)."""
    for network in learner.networks().values():
        network.zero_grad()
    loss = losses(learner, batch)[which]
    loss.backward()
    found = {
        f"{key}.{name}": weights.grad
        for key, network in learner.networks().items()
        for name, weights in network.named_parameters()
    }
    return loss.item(), {name: gradient for name, gradient in found.items() if gradient is not None}


def corrupt(batch, name, mask, garbage):
    """A field with other values where the mask is set: garbage, the opposite of flags, other actions."""
    values = batch[name]
    mask = mask.view(*mask.shape, *(1 for _ in values.shape[mask.dim() :])).expand_as(values)
    other = torch.full_like(values, garbage) if values.is_floating_point() else values
    if values.dtype == torch.bool:
        other = ~values
    elif "action" in name:
        other = (values + 1) % 4
    return torch.where(mask, other, values)


def assert_unchanged(learner, batch, corrupted, which=(0, 1)):
    """Both batches have the same losses and gradients."""
    for loss in which:
        expected, expected_gradients = gradients(learner, batch, loss)
        value, found = gradients(learner, corrupted, loss)
        assert value == pytest.approx(expected, rel=1e-6)
        assert found.keys() == expected_gradients.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected_gradients[name], rtol=1e-5, atol=1e-7)
