"""What command lines of libraries import of the package's own, over `runner launch`.

They are no part of `accel`, which does not know `runner`.
"""
