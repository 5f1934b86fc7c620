"""A stage's part in layer moves: weights and pages come and go while steps run."""
