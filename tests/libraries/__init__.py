"""Libraries written for Accelerate, run on `accel` and on the public package: losses side by side.

`python -m tests.libraries` prints the table.
"""
