"""The ways of the residual stream from one stage to the next."""
