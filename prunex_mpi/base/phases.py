"""The phases of an outer iteration: their names in records, on pictures and in sentences."""

# Those that each rank records, in the order in which an outer iteration comes to them.
PHASES = ("local", "intra", "project", "inter", "dual", "evaluate")
# Phases 2 to 5: what H-SADMM adds to local steps.
CONSENSUS_PHASES = ("intra", "project", "inter", "dual")
LABELS = {
    "local": "1 local steps",
    "intra": "2 in the node",
    "project": "3 projection",
    "inter": "4 between nodes",
    "dual": "5 corrections",
    "evaluate": "evaluation",
    "setup": "set-up",
}
IN_SENTENCES = {
    "local": "the local steps",
    "intra": "the exchange inside nodes",
    "project": "projection and masks",
    "inter": "the exchange between nodes",
    "dual": "corrections and norms",
    "evaluate": "evaluation",
    "setup": "setting up the method",
}
