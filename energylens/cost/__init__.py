"""Pricing: features, regressors, roofline, boards, and the bundle that carries them."""
