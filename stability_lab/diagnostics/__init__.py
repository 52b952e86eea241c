"""What is measured in the model, apart from what the training step measures of itself."""
