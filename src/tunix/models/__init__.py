"""Language models and their weights: pure functions over parameter trees, loading, saving."""
