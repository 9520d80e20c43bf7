"""The runner's plugins for Hydra, which looks for them in packages of the name `hydra_plugins`.

Hydra imports every module here at each start of any of its applications, so that nothing heavy is
imported before a plugin is used.
"""
