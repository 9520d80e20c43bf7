"""Where Hydra looks for recipes: the user's project behind the shipped `conf`."""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ProjectSearchPath(SearchPathPlugin):
    """Appends the `conf` folders of the user's project; other applications keep their path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them."""
        paths = sys.modules.get("runner.recipe.paths")  # not imported: it is another application
        main = [found.path for found in search_path.get_path() if found.provider == "main"]
        if paths is None or main != [str(paths.conf_folder())]:
            return
        for folder in paths.project_conf_folders():
            search_path.append("project", f"file://{folder}")
        for place in paths.given_conf_folders:
            search_path.append("command line", place)
