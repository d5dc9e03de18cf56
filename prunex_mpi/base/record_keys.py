"""The keys of what a run records (metrics.jsonl, layers.jsonl, ranks.jsonl), written and read.

And what the phases of an outer iteration are called on pictures and in sentences.
"""

PHASES = ("local", "intra", "project", "inter", "dual", "evaluate", "setup", "total")
# Of each rank apart; what a method does once to begin is in none of them.
RANK_PHASES = PHASES[:-2]
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
# Bytes: see `comm.traffic.Traffic`.
KINDS = ("dense", "payload", "sent", "mask", "intra", "control", "evaluate", "setup")
RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")
