"""The network's ops, with exact semantics: `reference` (plain torch, the truth) and `cpu` (native)."""
