"""Built-in models, data sets, objectives, optimizers and steps, registered like a user's."""
