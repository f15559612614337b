"""The battles. `battle.py` has the environment; it is made of the rules, tables and policies beside it."""
