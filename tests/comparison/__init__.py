"""The same scripts with the documented package and with accel."""
