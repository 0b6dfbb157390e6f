"""Self-distillation: a model answers seeds, its heads learn from the answers (Medusa 2.3.2)."""
