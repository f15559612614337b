"""Scripts are single files and share code by copies: these are equal, and neighbouring scripts differ in few lines."""

import ast
import difflib
import functools

import pytest
from helpers import MODEL_SCRIPTS, POLICY_SCRIPTS, POPULATION_SCRIPTS, ROOT, SCRIPTS, TEAM_SCRIPTS

# the only names that may have different contents in two scripts
OF_TEAM_SCRIPTS = {"FIELDS", "check_args", "Learner.__init__", "Learner.networks", "Learner.mix", "Learner.loss"}
OF_MODEL_SCRIPTS = {
    "FIELDS", "check_args", "make_team", "analyse", "load_player", "Args.team", "Args.latent_dim", "QNetwork.__init__",
    "OpponentModel.__init__", "OpponentModel.forward", "OpponentModel.unroll", "Player.__init__", "Player.reset",
    "Player.act", "Learner.__init__", "Learner.networks", "Learner.model_loss", "Learner.update", "QNetwork.forward",
}  # fmt: skip
OF_COMA = {  # that it has neither in common with those that learn values nor with other policy gradients
    "FIELDS", "PYMARL", "check_args", "load_player", "Args.num_envs", "Args.learning_rate", "Args.start_e",
    "Args.end_e", "Args.tau", "Args.td_lambda", "QNetwork.forward", "Critic.__init__", "Player.__init__", "Player.act",
    "Learner.__init__", "Learner.networks", "Learner.learn", "Learner.estimate", "Learner.loss", "Learner.update",
}  # fmt: skip
OF_ALL_SCRIPTS = OF_TEAM_SCRIPTS | OF_MODEL_SCRIPTS
OF_POLICY_SCRIPTS = {  # that they do not have in common with those that learn values
    "FIELDS", "check_args", "load_player", "Args.num_envs", "Args.total_timesteps", "Args.learning_rate", "Args.gamma",
    "Args.max_grad_norm", "Args.hidden_dim", "Player.__init__", "Player.act", "Learner.__init__", "Learner.networks",
    "Learner.learn", "Learner.loss", "Learner.update",
}  # fmt: skip
OF_POPULATION_SCRIPTS = {  # that they do not have in common with iql.py
    "FIELDS", "check_args", "load_player", "Args.num_envs", "Args.total_timesteps",
    "Args.buffer_size", "Args.train_frequency", "QNetwork.__init__", "QNetwork.init_hidden", "QNetwork.forward",
    "Player.__init__", "Player.act", "Learner.loss",
}  # fmt: skip
LINES = {
    "iql": 340, "vdn": 345, "qmix": 375, "qtran": 425, "naive_om_iql": 425, "liam_iql": 425, "mix_iql": 475,
    "belief_iql": 470, "ippo": 355, "mappo": 355, "coma": 405, "brdiv": 460, "hop": 620, "omg_iql": 760,
    "pretrain_cvae": 95,
}  # fmt: skip
CHANGED_LINES = {
    ("iql", "vdn"): 20, ("vdn", "qmix"): 65, ("qmix", "qtran"): 135, ("iql", "naive_om_iql"): 210,
    ("naive_om_iql", "liam_iql"): 100, ("naive_om_iql", "omg_iql"): 460, ("liam_iql", "mix_iql"): 105,
    ("naive_om_iql", "belief_iql"): 120, ("ippo", "mappo"): 10, ("iql", "brdiv"): 250,
}  # fmt: skip


def lines_of(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()


@functools.cache
def definitions(name):
    """The source of every function, method, field and constant of a script, with comments, by name."""
    lines, found = lines_of(name), {}

    def add(nodes, prefix=""):
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
                continue
            if isinstance(node, ast.FunctionDef):
                key = node.name
            elif isinstance(node, (ast.AnnAssign, ast.Assign)):
                key = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            else:
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            found[prefix + key] = "\n".join(lines[first - 1 : node.end_lineno])

    add(ast.parse("\n".join(lines)).body)
    return found


def test_definitions_include_comments_decorators_and_fields():
    found = definitions("iql")
    assert found["Args.gamma"] == "    gamma: float = 0.97  # discount factor"
    assert definitions("omg_iql")["analyse"].startswith("@torch.no_grad()\ndef analyse(learner, ")


@pytest.mark.parametrize(
    ("names", "may_differ"),
    [(TEAM_SCRIPTS, OF_TEAM_SCRIPTS), (MODEL_SCRIPTS, OF_MODEL_SCRIPTS), (SCRIPTS, OF_ALL_SCRIPTS)],
    ids=["team scripts", "opponent models", "all"],
)
def test_what_several_scripts_define_is_equal(names, may_differ):
    versions = {}
    for name in names:
        for key, source in definitions(name).items():
            versions.setdefault(key, {}).setdefault(source, []).append(name)
    in_all = {key for key, found in versions.items() if sum(map(len, found.values())) == len(names)}
    assert len(in_all - may_differ) > 25
    assert {"ReplayBuffer.sample", "lambda_returns", "epsilon_greedy", "Learner.learn"} <= in_all
    different = {key: list(found.values()) for key, found in versions.items() if len(found) > 1}
    assert {key: groups for key, groups in different.items() if key not in may_differ} == {}
    assert may_differ <= different.keys()  # no exception that is not needed


def test_policy_gradients_share_the_code_of_the_others():
    one, other = map(definitions, POLICY_SCRIPTS)
    assert one.keys() == other.keys()
    assert {key for key in one if one[key] != other[key]} == {"CRITIC_INPUT"}
    shared = {key for name in SCRIPTS for key in definitions(name).keys() & one.keys()}
    equal = {key for key in shared if any(definitions(name).get(key) == one[key] for name in TEAM_SCRIPTS)}
    assert {"lambda_returns", "Player.reset"} <= equal
    assert shared - equal == OF_POLICY_SCRIPTS


@pytest.mark.parametrize("name", POPULATION_SCRIPTS)
def test_populations_share_the_code_of_independent_learners(name):
    one, other = definitions("iql"), definitions(name)
    shared = one.keys() & other.keys()
    assert {
        "lambda_returns",
        "ReplayBuffer.sample",
        "Learner.__init__",
        "Learner.update",
    } <= shared
    assert {key for key in shared if one[key] != other[key]} == OF_POPULATION_SCRIPTS


def test_coma_shares_the_code_of_the_others():
    own = {key.replace("Policy.", "QNetwork."): text for key, text in definitions("coma").items()}
    others = [definitions(name) for name in (*TEAM_SCRIPTS, *POLICY_SCRIPTS)]
    shared = {key for key in own if any(key in other for other in others)}
    equal = {key for key in shared if any(other.get(key) == own[key] for other in others)}
    assert {"QNetwork.__init__", "lambda_returns"} <= equal
    assert shared - equal == OF_COMA


def test_options_of_the_pretraining_are_those_of_omg():
    """Its file can only be used with the same sizes; other defaults have other reasons."""
    one, other = definitions("omg_iql"), definitions("pretrain_cvae")
    shared = {key for key in one.keys() & other.keys() if key.startswith("Args.")}
    assert {"Args.latent_dim", "Args.inference", "Args.predict", "Args.kl_weight"} <= shared
    different = {key for key in shared if one[key] != other[key]}
    assert different <= {
        "Args.team", "Args.num_envs", "Args.batch_size", "Args.pretrain_timesteps",
    }  # fmt: skip


@pytest.mark.parametrize(("pair", "limit"), CHANGED_LINES.items(), ids=str)
def test_neighbouring_scripts_differ_in_few_lines(pair, limit):
    one, other = map(lines_of, pair)
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    equal = sum(block.size for block in matcher.get_matching_blocks())
    assert len(one) + len(other) - 2 * equal <= limit  # lines removed and added


@pytest.mark.parametrize(("name", "limit"), LINES.items(), ids=str)
def test_scripts_are_short(name, limit):
    assert len(lines_of(name)) <= limit
