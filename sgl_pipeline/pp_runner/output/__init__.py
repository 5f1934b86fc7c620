"""From the last layer to a token: head, adjustments, masks, sampler, log-probabilities."""
