"""Pure functions of arrays: log-probabilities, policy losses, KL estimators, aggregation."""
