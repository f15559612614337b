"""Environments whose matches other programs play, one process for each: StarCraft II, and PettingZoo's worlds."""
