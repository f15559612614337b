"""For the tests of environments: what a call showed, and comparing it."""

import torch


def shown(result):
    """A copy of everything that a call returned, by name."""
    names = ("obs",) if len(result) == 2 else ("obs", "reward", "terminated", "truncated")
    return {key: tensor.clone() for key, tensor in {**dict(zip(names, result)), **result[-1]}.items()}


def assert_same(first, second, rows=slice(None)):
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key][rows], second[key][rows].to(first[key].device)), key
