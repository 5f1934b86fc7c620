"""Checks the forecasts of simulator, predictor and tuning against what came."""
