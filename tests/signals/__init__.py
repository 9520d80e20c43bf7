"""Runs that are ended from outside, or by their own code: what they save, say and leave behind."""
