"""How `models/demo` is made, step by step; `tools.train_demo_model` runs the steps."""
