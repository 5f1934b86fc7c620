"""The links that carry the residual stream from one stage to the next."""
