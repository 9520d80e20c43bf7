"""How the model is distributed over processes: one room per strategy, chosen by the table."""
