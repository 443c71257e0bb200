"""The model, its tiers, gradients and training."""
