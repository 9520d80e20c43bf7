"""How the model is spread over the processes: one room per backend, chosen by the table."""
