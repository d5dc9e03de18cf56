"""The keys of what a run records, metrics.jsonl, layers.jsonl and ranks.jsonl: written and read."""

PHASES = ("local", "intra", "project", "inter", "dual", "evaluate", "setup", "total")
# Of each rank apart; what a method does once to begin is in none of them.
RANK_PHASES = PHASES[:-2]
# Bytes: see `comm.traffic.Traffic`.
KINDS = ("dense", "payload", "sent", "mask", "intra", "control", "evaluate", "setup")
RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")
