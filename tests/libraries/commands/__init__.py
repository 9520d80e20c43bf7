"""What command lines of libraries import of the package's own, over `accel launch`.

They are no part of `accel`: the public package does not document them.
"""
