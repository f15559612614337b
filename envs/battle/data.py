"""What the battles are made of: the units, the terrains and SMAC's 23 maps. To add one, add an entry to its table.

Times are in StarCraft's "normal" seconds (16 game loops each), lengths in map cells.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    health: float
    radius: float  # weapons measure from edge to edge
    speed: float  # a second
    range: float  # of the weapon, or of the healing beam
    period: float = 0.0  # seconds from attack to attack
    damage: float = 0.0
    hits: int = 1  # an attack of two hits meets the armour twice
    interval: float = 0.0  # seconds from the first hit to the second; 0: both at once
    wind_up: float = 0.167  # seconds from the beginning of an attack to its damage
    recovery: float = 0.0  # seconds more to the next attack
    backswing: float = 0.5  # seconds after the damage in which a unit that acts by itself does not walk
    slop: float = 1.0  # a unit that is firing goes on, without walking, up to this much beyond its range
    versus_light: float = 0.0  # added damage
    versus_armoured: float = 0.0
    armour: float = 0.0
    shield: float = 0.0
    regeneration: float = 0.0  # health a second
    separation: float | None = None  # how near others may stand, where it is not the radius
    cooldown_scale: float = 15.0  # what SMAC divides the cooldown by in the state
    light: bool = False
    armoured: bool = False
    biological: bool = False
    flies: bool = False
    climbs: bool = False  # over cliffs
    hits_air: bool = True
    splash: str = ""  # "line": across the direction of fire; "blast": all round, and the unit dies of it
    heals: bool = False


ZERG = 0.2734  # the health a Zerg unit gains a second

UNITS = {
    "marine": Unit(45, 0.375, 2.25, 5, 0.8608, 6, wind_up=0.05, backswing=0.75, light=True, biological=True),
    "marauder": Unit(
        125,
        0.5625,
        2.25,
        6,
        1.5,
        10,
        wind_up=0,
        backswing=0,
        versus_armoured=10,
        armour=1,
        cooldown_scale=25,
        armoured=True,
        biological=True,
        hits_air=False,
    ),
    "medivac": Unit(
        150, 0.75, 2.75, 4, wind_up=0, slop=0, armour=1, cooldown_scale=200, armoured=True, flies=True, heals=True
    ),
    "stalker": Unit(
        80, 0.625, 2.9531, 6, 1.44, 10, versus_armoured=4, armour=1, shield=80, cooldown_scale=35, armoured=True
    ),
    "zealot": Unit(
        100,
        0.5,
        2.25,
        0.1,
        1.2,
        8,
        hits=2,
        interval=0.28,
        wind_up=0,
        armour=1,
        shield=50,
        separation=0.375,
        cooldown_scale=22,
        light=True,
        biological=True,
        hits_air=False,
    ),
    "colossus": Unit(
        200,
        1.0,
        2.25,
        6,
        2.2,
        20,
        hits=2,
        wind_up=0.083,
        slop=0,
        armour=1,
        shield=150,
        separation=0.75,
        cooldown_scale=24,
        armoured=True,
        climbs=True,
        hits_air=False,
        splash="line",
    ),
    "hydralisk": Unit(
        80, 0.625, 2.25, 5, 0.83, 12, wind_up=0.208, regeneration=ZERG, cooldown_scale=10, light=True, biological=True
    ),
    "zergling": Unit(
        35,
        0.375,
        2.9531,
        0.1,
        0.696,
        5,
        regeneration=ZERG,
        cooldown_scale=11,
        light=True,
        biological=True,
        hits_air=False,
    ),
    "baneling": Unit(
        30,
        0.375,
        2.5,
        0.25,
        damage=20,
        wind_up=0,
        versus_light=15,
        regeneration=ZERG,
        cooldown_scale=1,
        biological=True,
        hits_air=False,
        splash="blast",
    ),
    "spinecrawler": Unit(
        300,
        0.875,
        0,
        7,
        1.6,
        25,
        wind_up=0.333,
        recovery=0.4,
        slop=0,
        versus_armoured=5,
        armour=2,
        regeneration=ZERG,
        armoured=True,
        biological=True,
        hits_air=False,
    ),
}

# Rules that can be switched off, each by itself, to see what it does to the maps. docs/battles.md has them in words.
RULES = {
    "wind_up": True,  # damage comes a while after the beginning of an attack, and not at all if the target gets away
    "second_blow": True,  # a zealot's two hits come one after the other, not at once
    "recovery": True,  # a spine crawler needs longer from attack to attack than the data say: fitted to SMAC's returns
    "backswing": True,  # after an attack a unit stands for a while, unless it gets an order
    "slop": True,  # a unit that is firing goes on a little beyond its range
    "look_again": True,  # out of weapon range a target gives way to the nearest; off: kept within the scan range
    "scan_anew": True,  # who cannot move takes the nearest for every attack; off: it keeps its target within range
    "armed_first": True,  # those that cannot hit back are targets only where there are no others
    "strike_back": True,  # a unit without a target takes whoever hits it, however far away
    "call_for_help": True,  # and so do those near it
    "surround": True,  # who is held up goes round the others; off: only round one who stands, left or right at random
}

# For each family of maps: the order in which SMAC numbers the kinds of allies, and the type bits of the enemies.
# Families of one kind have no type bits.
TYPES = {
    "marines": (("marine",), ()),
    "stalkers": (("stalker",), ()),
    "zealots": (("zealot",), ()),
    "hydralisks": (("hydralisk",), ()),
    "colossus": (("colossus",), ()),
    "MMM": (("marauder", "marine", "medivac"), ("marauder", "marine", "medivac")),
    "stalkers_and_zealots": (("stalker", "zealot"), ("zealot", "stalker")),  # SMAC turns the enemy's round
    "colossi_stalkers_zealots": (("colossus", "stalker", "zealot"), ("colossus", "stalker", "zealot")),
    "bane": (("baneling", "zergling"), ("baneling", "zergling")),
}


@dataclass(frozen=True)
class Map:
    terrain: str  # a key of TERRAINS
    limit: int  # environment steps
    races: str  # the allies' and the enemies': T, P or Z; Protoss units show their shields
    types: str  # a key of TYPES
    allies: list  # groups: (how many, of which unit, round which point)
    enemies: list
    order: tuple  # the enemy's: ("go", point), ("go_between", point, point), ("hunt",) or ("stay",)


@dataclass(frozen=True)
class Scenario:
    """Random teams and places, as in SMACv2."""

    race: str  # a key of RACES
    allies: int
    enemies: int
    limit: int = 200
    unit_ranges: bool = True  # whether every kind sees and reaches as far as it does, or all as in SMAC
    own_pos: bool = True  # whether agents see where they are
    cone: bool = False  # whether they see only where they look
    action_mask: bool = True  # whether only targets in reach are available
    prob_obs_enemy: float = 1.0  # how often an agent is told of an enemy that another has sighted
    released: bool = False  # whether an enemy that an agent does not know of hides those before it, too


@dataclass(frozen=True)
class Recruit:
    weight: float  # how often a unit is of this kind
    sight: float  # how far it sees
    reach: float  # how far it may be told to shoot
    rare: bool = False  # a team is never of this kind alone


# Of each race of SMACv2 the kinds, in the order of its type bits. Agents are numbered by the names of kinds.
RACES = {
    "terran": {"marine": Recruit(0.45, 9, 5), "marauder": Recruit(0.45, 10, 6), "medivac": Recruit(0.1, 11, 4, True)},
    "protoss": {"stalker": Recruit(0.45, 10, 6), "zealot": Recruit(0.45, 9, 2), "colossus": Recruit(0.1, 10, 7)},
    "zerg": {"zergling": Recruit(0.45, 8, 2), "hydralisk": Recruit(0.45, 9, 5), "baneling": Recruit(0.1, 8, 2, True)},
}
SIZES = ((5, 5), (10, 10), (10, 11), (20, 20), (20, 23))
SCENARIOS = {f"smacv2/{race}_{n}_vs_{k}": Scenario(race, n, k) for race in RACES for n, k in SIZES}

# fmt: off
MAPS = {
    "3m": Map(
        terrain="band", limit=60, races="TT", types="marines",
        allies=[(3, "marine", (9, 16))],
        enemies=[(3, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "8m": Map(
        terrain="band", limit=120, races="TT", types="marines",
        allies=[(8, "marine", (9, 16))],
        enemies=[(8, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "25m": Map(
        terrain="band", limit=150, races="TT", types="marines",
        allies=[(25, "marine", (9, 16))],
        enemies=[(25, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "5m_vs_6m": Map(
        terrain="band", limit=70, races="TT", types="marines",
        allies=[(5, "marine", (9, 16))],
        enemies=[(6, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "8m_vs_9m": Map(
        terrain="band", limit=120, races="TT", types="marines",
        allies=[(8, "marine", (9, 16))],
        enemies=[(9, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "10m_vs_11m": Map(
        terrain="band", limit=150, races="TT", types="marines",
        allies=[(10, "marine", (9, 16))],
        enemies=[(11, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "27m_vs_30m": Map(
        terrain="band", limit=180, races="TT", types="marines",
        allies=[(27, "marine", (9, 16))],
        enemies=[(30, "marine", (23, 16))],
        order=("go", (9, 16)),
    ),
    "MMM": Map(
        terrain="band", limit=150, races="TT", types="MMM",
        allies=[(7, "marine", (9, 16)), (2, "marauder", (9, 16)), (1, "medivac", (9, 16))],
        enemies=[(7, "marine", (23, 16)), (2, "marauder", (23, 16)), (1, "medivac", (23, 16))],
        order=("go", (9, 16)),
    ),
    "MMM2": Map(
        terrain="band", limit=180, races="TT", types="MMM",
        allies=[(7, "marine", (9, 16)), (2, "marauder", (9, 16)), (1, "medivac", (9, 16))],
        enemies=[(8, "marine", (23, 16)), (3, "marauder", (23, 16)), (1, "medivac", (23, 16))],
        order=("go", (9, 16)),
    ),
    "2s3z": Map(
        terrain="band", limit=120, races="PP", types="stalkers_and_zealots",
        allies=[(2, "stalker", (9, 16)), (3, "zealot", (9, 16))],
        enemies=[(2, "stalker", (23, 16)), (3, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "3s5z": Map(
        terrain="band", limit=150, races="PP", types="stalkers_and_zealots",
        allies=[(3, "stalker", (9, 16)), (5, "zealot", (9, 16))],
        enemies=[(3, "stalker", (23, 16)), (5, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "3s5z_vs_3s6z": Map(
        terrain="band", limit=170, races="PP", types="stalkers_and_zealots",
        allies=[(3, "stalker", (9, 16)), (5, "zealot", (9, 16))],
        enemies=[(3, "stalker", (23, 16)), (6, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "3s_vs_3z": Map(
        terrain="field", limit=150, races="PP", types="stalkers",
        allies=[(3, "stalker", (9, 16))],
        enemies=[(3, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "3s_vs_4z": Map(
        terrain="field", limit=200, races="PP", types="stalkers",
        allies=[(3, "stalker", (9, 16))],
        enemies=[(4, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "3s_vs_5z": Map(
        terrain="field", limit=250, races="PP", types="stalkers",
        allies=[(3, "stalker", (9, 16))],
        enemies=[(5, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "1c3s5z": Map(
        terrain="band", limit=180, races="PP", types="colossi_stalkers_zealots",
        allies=[(1, "colossus", (9, 16)), (3, "stalker", (9, 16)), (5, "zealot", (9, 16))],
        enemies=[(1, "colossus", (23, 16)), (3, "stalker", (23, 16)), (5, "zealot", (23, 16))],
        order=("go", (9, 16)),
    ),
    "2m_vs_1z": Map(
        terrain="arena", limit=150, races="TP", types="marines",
        allies=[(1, "marine", (13, 12)), (1, "marine", (19, 12))],
        enemies=[(1, "zealot", (16, 19))],
        order=("go_between", (13, 12), (19, 12)),
    ),
    "corridor": Map(
        terrain="corridor", limit=400, races="PZ", types="zealots",
        allies=[(6, "zealot", (19.0397, 19.1198))],
        enemies=[(24, "zergling", (27.91, 28.24))],
        order=("go", (4.47, 4.3298)),
    ),
    "6h_vs_8z": Map(
        terrain="pit", limit=150, races="ZP", types="hydralisks",
        allies=[(6, "hydralisk", (14.5998, 9.49))],
        enemies=[(8, "zealot", (14.41, 16.7597))],
        order=("go", (14.5998, 9.49)),
    ),
    "2s_vs_1sc": Map(
        terrain="nest", limit=300, races="PZ", types="stalkers",
        allies=[(1, "stalker", (11.1208, 10.338)), (1, "stalker", (16.976, 10.3662))],
        enemies=[(1, "spinecrawler", (13.92, 20.0397))],
        order=("stay",),
    ),
    "so_many_baneling": Map(
        terrain="slope", limit=100, races="PZ", types="zealots",
        allies=[(7, "zealot", (11.469, 12.0234))],
        enemies=[(32, "baneling", (27.91, 28.24))],
        order=("go", (4.47, 4.3298)),
    ),
    "bane_vs_bane": Map(
        terrain="arena", limit=200, races="ZZ", types="bane",
        allies=[(20, "zergling", (16, 11)), (4, "baneling", (16, 8))],
        enemies=[(20, "zergling", (16, 21)), (4, "baneling", (16, 24))],
        order=("go", (16, 8)),
    ),
    "2c_vs_64zg": Map(
        terrain="plateau", limit=400, races="PZ", types="colossus",
        allies=[(1, "colossus", (16, 16)), (1, "colossus", (16, 16))],
        enemies=[(64, "zergling", (16, 9))],
        order=("hunt",),
    ),
}

# North is up. '#' cannot be entered; '.' is low ground, 'H' high, and only the ramps 'r' join them.
TERRAINS = {
    "band": """
################################
################################
################################
################################
################################
################################
################################
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
################################
################################
################################
################################
################################
################################
################################
""",
    "field": """
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
................................
""",
    "arena": """
################################
################################
################################
################################
################################
#########..............#########
########................########
#######..................#######
######....................######
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
#####......................#####
######....................######
#######..................#######
########................########
#########..............#########
################################
################################
################################
################################
################################
""",
    "corridor": """
################################
###################............#
##################.............#
#################..............#
################...............#
###############................#
##############.................#
#############..................#
############...................#
###########....................#
###########....................#
###########....................#
###########....................#
###########....................#
###########....................#
############..................##
############.................###
###########.................####
##########.................#####
#...............################
#..............#################
#.............##################
#............###################
#............###################
#............###################
#............###################
#............###################
#............###################
#.............##################
#..............#################
#..............#################
################################
""",
    "pit": """
################################
################################
################################
################################
################################
################################
################################
################################
################################
################################
################################
#########............###########
########..............##########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
#######................#########
########..............##########
#########............###########
################################
################################
################################
################################
################################
################################
################################
""",
    "nest": """
################################
################################
################################
################################
################################
################################
################################
###########......###############
##########........##############
#########..........#############
########............############
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
#######..............###########
################################
################################
################################
################################
################################
################################
################################
""",
    "slope": """
################################
#####################..........#
####################...........#
###################............#
###################............#
###################............#
##################.............#
###############................#
##############.................#
#############..................#
#############..................#
#############...............####
############...............#####
#########..................#####
########...................#####
#######...............##########
#######..............###########
#######..............###########
######...............###########
###..................###########
###..................###########
###...............##############
##...............###############
#................###############
#................###############
#.............##################
#............###################
#............###################
#............###################
#.........######################
#........#######################
################################
""",
    "plateau": """
################################
################################
################################
################################
################################
################################
################################
################################
################################
################################
################################
###....HHHHHHHHHHHHHHHHHH....###
##.....HHHHHHHHHHHHHHHHHH.....##
#...rrrHHHHHHHHHHHHHHHHHHrrr...#
....rrrHHHHHHHHHHHHHHHHHHrrr....
....rrrHHHHHHHHHHHHHHHHHHrrr....
....rrrHHHHHHHHHHHHHHHHHHrrr....
....rrrHHHHHHHHHHHHHHHHHHrrr....
....rrrHHHHHHHHHHHHHHHHHHrrr....
................................
................................
................................
................................
................................
#..............................#
##............................##
###..........................###
################################
################################
################################
################################
################################
""",
}
# fmt: on
