from smac.env.starcraft2.starcraft2 import StarCraft2Env

__all__ = ["StarCraft2Env"]
