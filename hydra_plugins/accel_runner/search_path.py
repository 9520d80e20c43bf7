"""Where Hydra looks for recipes: the user's project behind the shipped `conf`."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ProjectSearchPath(SearchPathPlugin):
    """Makes the shipped `conf` whole: its schema, and the `conf` folders of the user's project.

    Any Hydra program may compose it; others keep their search path.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders."""
        from runner.recipe import paths

        main = [found.path for found in search_path.get_path() if found.provider == "main"]
        if [Path(path.removeprefix("file://")).resolve() for path in main] != [
            paths.conf_folder().resolve()
        ]:
            return
        from runner.recipe import hydra_setup

        hydra_setup.prepare()
        for folder in paths.project_conf_folders():
            search_path.append("project", f"file://{folder}")
        for place in paths.given_conf_folders:
            search_path.append("command line", place)
