"""Commands over many runs: python -m experiments.sweep, evaluate, strangers, paper and compare."""
