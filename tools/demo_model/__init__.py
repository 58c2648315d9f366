"""The steps that create `models/demo`. `tools.train_demo_model` runs them."""
