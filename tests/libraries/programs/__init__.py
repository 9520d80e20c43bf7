"""Short trainings, as a user of each library writes them: `run(options, folder)` returns numbers.

They name the engine `accelerate` throughout, and know nothing of whose code answers.
"""
