"""What simulator, predictor and tuning promise, beside what came."""
